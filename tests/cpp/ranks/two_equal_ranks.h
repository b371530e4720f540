// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "engine/work.h"
#include "fake_device/fake_device.h"

// Rank 0 of a group of two whose tensors are always equal: a sum over ranks is twice the tensor.
namespace powersgd::test {

// Returns a contiguous tensor of any device as the CPU sees its memory.
inline at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {tensor.numel()}, tensor.scalar_type());
}

// Makes the sum over both ranks. Integers are tables with a row for each rank, in which the rows of
// the other ranks are 0.
inline void sum_over_ranks(const at::Tensor& tensor) {
  const at::Tensor seen = on_host(tensor);
  if (seen.scalar_type() == at::kLong) {
    const auto rows = seen.chunk(2);
    rows[1].copy_(rows[0]);
  } else {
    seen.mul_(2);
  }
}

// Makes what both ranks gather.
inline void gather_from_ranks(const at::Tensor& output, const at::Tensor& input) {
  for (const at::Tensor& part : on_host(output).chunk(2)) part.copy_(on_host(input));
}

// Like NCCL, runs an asynchronous collective on a stream of its own, after the caller's stream, and
// any other on the caller's stream, for which it returns no Work. All of a device run in the order
// in which they are issued.
class StreamBackend : public c10d::Backend {
 public:
  StreamBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "stream"; }

  std::vector<std::string> ran;  // in the order in which the device ran them
  bool fails = false;
  bool orders_streams = true;  // else collectives on two streams run in any order

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const at::Tensor tensor = tensors[0];
    return run(tensors, options.asyncOp, [self = owned(), seen = on_host(tensor)] {
      sum_over_ranks(seen);
      self->ran.push_back(std::to_string(seen.numel()));
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return run({input, output}, options.asyncOp,
               [self = owned(), in = on_host(input), out = on_host(output)] {
                 gather_from_ranks(out, in);
                 self->ran.push_back("gather " + std::to_string(in.numel()));
               });
  }

 private:
  // The device may run a collective after the group has gone.
  c10::intrusive_ptr<StreamBackend> owned() {
    return c10::intrusive_ptr<StreamBackend>::unsafe_reclaim_from_nonowning(this);
  }

  c10::intrusive_ptr<c10d::Work> run(const std::vector<at::Tensor>& tensors, bool is_async,
                                     const std::function<void()>& collective) {
    TORCH_CHECK(!fails, "the communicator was aborted");
    const c10::Device device = tensors[0].device();
    const c10::impl::VirtualGuardImpl impl(device.type());
    const c10::Stream callers = impl.getStream(device);
    Communicator& communicator =
        communicators_.try_emplace(device.index(), Communicator{impl, device}).first->second;
    const c10::Stream stream = is_async ? communicator.stream : callers;
    record(callers).block(stream);
    // NCCL keeps the order in a graph as well, by other means than an event outside of it.
    const bool orders = orders_streams && !fake_device::is_capturing(device);
    if (orders) communicator.last.block(stream);
    for (const at::Tensor& tensor : tensors) {
      impl.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    const c10::StreamGuard guard(stream);
    fake_device::enqueue(device, collective);
    if (orders) communicator.last = record(stream);
    if (!is_async) return nullptr;
    return c10::make_intrusive<StreamWork>(0, tensors, record(stream), nullptr);
  }

  struct Communicator {
    Communicator(const c10::impl::VirtualGuardImpl& impl, c10::Device device)
        : stream(impl.getStreamFromGlobalPool(device)), last(device.type()) {}
    c10::Stream stream;
    c10::Event last;  // after the last collective
  };

  static c10::Event record(const c10::Stream& stream) {
    c10::Event event(stream.device_type());
    event.record(stream);
    return event;
  }

  std::map<c10::DeviceIndex, Communicator> communicators_;
};

// Like Gloo, waits for the caller's stream and returns the sum.
class HostBackend : public c10d::Backend {
 public:
  HostBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "host"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    wait_for_stream(tensors[0].device());
    sum_over_ranks(tensors[0]);
    return nullptr;
  }
  // What this rank sends, the other one sends as well. Other threads may wait for it.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int, int tag) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    sent_[tag] = tensors[0].clone();
    return c10::make_intrusive<Message>(nullptr);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int, int tag) override {
    return c10::make_intrusive<Message>([this, output = tensors[0], tag] {
      const std::lock_guard<std::mutex> lock(mutex_);
      output.copy_(sent_.at(tag));
    });
  }

 private:
  class Message : public c10d::Work {
   public:
    explicit Message(std::function<void()> arrive) : arrive_(std::move(arrive)) {}
    bool wait(std::chrono::milliseconds) override {
      if (arrive_) arrive_();
      return true;
    }

   private:
    const std::function<void()> arrive_;
  };

  static void wait_for_stream(c10::Device device) {
    if (device.is_cpu()) return;
    c10::Event ready(device.type());
    ready.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    ready.synchronize();
  }

  std::mutex mutex_;
  std::map<int, at::Tensor> sent_;  // by tag, under the mutex
};

}  // namespace powersgd::test

// SPDX-License-Identifier: BSD-3-Clause
#include "engine/stream_engine.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/backend_channel.h"
#include "engine/work.h"

namespace powersgd {
namespace {

using StreamWorkPtr = c10::intrusive_ptr<StreamWork>;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream new_side_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Event record(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

}  // namespace

struct StreamEngine::Shared {
  // The side streams of one device.
  struct SideStreams {
    explicit SideStreams(c10::Device device)
        : ahead(new_side_stream(device)), behind(new_side_stream(device)) {}

    const c10::Stream ahead;   // runs the parts of a pipeline's jobs that run ahead
    const c10::Stream behind;  // runs all others

    // The members below belong to the pipeline in progress.
    bool begun = false;
    std::unordered_set<const void*> changed;  // by its jobs
    std::optional<c10::Event> last_collective;

    void reset() {
      begun = false;
      changed.clear();
      last_collective.reset();
    }

    // Makes both streams wait for the caller's, and the parts ahead for all earlier parts. They
    // share states with earlier parts, and the allocator reuses the memory that those have
    // released. `behind` waits for `ready` first: a stream in a graph capture may wait only for
    // other captured streams, and waiting for the caller's stream is what makes `behind` one.
    void begin(c10::Event& ready) {
      ready.block(behind);
      record(behind).block(ahead);
      begun = true;
    }
  };

  // Runs collectives on the current stream, which is one of the device's side streams.
  class SideChannel final : public Channel {
   public:
    SideChannel(SideStreams& side, c10d::Backend& backend, const Job& job,
                std::chrono::milliseconds timeout)
        : side_(side), job_(job), channel_(backend, timeout) {}

    void allreduce(at::Tensor& payload) override {
      in_order([&] { channel_.allreduce(payload); });
    }
    void allgather(at::Tensor& output, at::Tensor& input, const Members* members) override {
      in_order([&] { channel_.allgather(output, input, members); });
    }
    void alltoall(at::Tensor& output, at::Tensor& input, const Members* members) override {
      in_order([&] { channel_.alltoall(output, input, members); });
    }

   private:
    // NCCL itself runs the collectives of one communicator one after the other, whatever their
    // streams. c10d's contract does not say so, and the events cost next to nothing: they add no
    // wait that the communicator does not make.
    template <typename Collective>
    void in_order(const Collective& collective) {
      const std::shared_ptr<void> observed = job_.observe ? job_.observe() : nullptr;
      if (!side_.begun) return collective();
      const c10::Stream stream = current_stream(side_.ahead.device());
      if (side_.last_collective) side_.last_collective->block(stream);
      collective();
      side_.last_collective.emplace(record(stream));
    }

    SideStreams& side_;
    const Job& job_;
    BackendChannel channel_;
  };

  // A job whose later parts are yet to be enqueued. The Work keeps the job's tensors until then.
  struct Begun {
    StreamWorkPtr work;
    Job job;
    SideStreams* side;
    std::optional<c10::Event> ahead_done;  // unset if all parts are on one stream
    std::chrono::milliseconds timeout;
    std::exception_ptr error;
  };

  explicit Shared(c10::intrusive_ptr<c10d::Backend> backend) : channel(std::move(backend)) {}

  const c10::intrusive_ptr<c10d::Backend> channel;
  std::atomic<bool> closed{false};   // no more jobs
  std::atomic<bool> aborted{false};  // parts that are not yet enqueued fail

  std::timed_mutex mutex;  // guards the members below, so collectives follow submit()'s order
  std::map<c10::DeviceIndex, SideStreams> side_streams;
  std::optional<Begun> pending;  // the job whose later parts are deferred

  // Enqueued jobs, whose futures are completed without the mutex: a callback may submit a job.
  using Ended = std::vector<std::pair<StreamWorkPtr, c10::Stream>>;

  // Runs `body`. The first exception is the job's error; a device that fails throws more of them.
  template <typename Body>
  static void attempt(std::exception_ptr& error, const Body& body) {
    try {
      body();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }

  // Runs the parts [begin, end).
  void run(size_t begin, size_t end, const c10::Stream& stream, Begun& job) {
    if (job.error) return;
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(stream);
    attempt(job.error, [&] {
      SideChannel side_channel(*job.side, *channel, job.job, job.timeout);
      for (size_t part = begin; part < end; ++part) job.job.parts[part](side_channel);
    });
    if (job.error && job.job.undo) attempt(job.error, job.job.undo);
  }

  Begun begin(StreamWorkPtr work, Job job, c10::Device device, std::chrono::milliseconds timeout) {
    SideStreams& side = side_streams.try_emplace(device.index(), device).first->second;
    const bool in_pipeline = !job.local && (pending || job.more_follow);
    c10::Event ready = record(current_stream(device));
    if (in_pipeline && !side.begun) {
      side.begin(ready);
    } else {
      ready.block(in_pipeline ? side.ahead : side.behind);
    }
    // The allocator must not reuse the memory before the side streams are done with it.
    const c10::impl::VirtualGuardImpl impl(device.type());
    for (const at::Tensor& tensor : work->tensors()) {
      const c10::DataPtr& memory = tensor.storage().data_ptr();
      impl.recordDataPtrOnStream(memory, side.behind);
      if (in_pipeline) impl.recordDataPtrOnStream(memory, side.ahead);
    }
    Begun begun{std::move(work), std::move(job), &side, std::nullopt, timeout, nullptr};
    run(0, begun.job.parts_ahead, in_pipeline ? side.ahead : side.behind, begun);
    if (in_pipeline) begun.ahead_done.emplace(record(side.ahead));
    side.changed.insert(begun.job.changes.begin(), begun.job.changes.end());
    return begun;
  }

  void end(Begun begun, Ended& ended) {
    const c10::Stream stream = begun.side->behind;
    if (aborted && !begun.error) begun.error = closed_error();
    attempt(begun.error, [&] {
      if (begun.ahead_done) begun.ahead_done->block(stream);
    });
    run(begun.job.parts_ahead, begun.job.parts.size(), stream, begun);
    c10::Event done(stream.device_type());
    attempt(begun.error, [&] { done.record(stream); });
    begun.work->enqueued(std::move(done), begun.error);
    ended.emplace_back(std::move(begun.work), stream);
  }

  void end_pending(Ended& ended) {
    if (pending) end(*std::exchange(pending, std::nullopt), ended);
  }

  bool shares_an_object(const Job& job, c10::Device device) const {
    const auto side = side_streams.find(device.index());
    return side != side_streams.end() &&
           std::any_of(job.changes.begin(), job.changes.end(),
                       [&](const void* object) { return side->second.changed.count(object) > 0; });
  }

  void submit(const StreamWorkPtr& work, Job job, c10::Device device,
              std::chrono::milliseconds timeout, Ended& ended) {
    if (!job.local) {
      if (job.alone || shares_an_object(job, device)) end_pending(ended);
      // The events of an earlier pipeline may lie outside of the graph that is being captured.
      // SideStreams::begin orders the next pipeline after it without them.
      if (!pending)
        std::for_each(side_streams.begin(), side_streams.end(),
                      [](auto& of) { of.second.reset(); });
    }
    Begun begun = begin(work, std::move(job), device, timeout);
    if (!begun.job.local) end_pending(ended);
    // A shutdown may have given up on the mutex while the first parts were enqueued.
    if (begun.job.more_follow && !begun.job.alone && !begun.error && !closed) {
      pending = std::move(begun);
    } else {
      end(std::move(begun), ended);
    }
  }

  // Enqueues the deferred parts, or fails them after abort.
  void flush() { flush(std::unique_lock<std::timed_mutex>(mutex)); }

  // Does so unless another thread, hanging in the backend, holds the mutex for all of `bound`.
  void flush_within(std::chrono::milliseconds bound) {
    if (std::unique_lock<std::timed_mutex> lock(mutex, bound); lock) flush(std::move(lock));
  }

  void flush(std::unique_lock<std::timed_mutex> lock) {
    Ended ended;
    end_pending(ended);
    lock.unlock();
    complete(ended);
  }

  static void complete(const Ended& ended) {
    for (const auto& [work, stream] : ended) {
      const c10::StreamGuard guard(stream);
      work->complete_future();
    }
  }
};

StreamEngine::StreamEngine(int rank, c10::intrusive_ptr<c10d::Backend> channel, Grace grace)
    : rank_(rank), grace_(grace), shared_(std::make_shared<Shared>(std::move(channel))) {}

StreamEngine::~StreamEngine() {
  try {
    shutdown();
  } catch (const std::exception& error) {  // of the device, which may be lost
    LOG(ERROR) << "powersgd: a step did not complete: " << error.what();
  }
}

c10::intrusive_ptr<c10d::Work> StreamEngine::submit(std::vector<at::Tensor> tensors, Job job,
                                                    c10::Device device,
                                                    std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<StreamWork>(rank_, std::move(tensors),
                                              [engine = std::weak_ptr<Shared>(shared_)] {
                                                if (const auto shared = engine.lock())
                                                  shared->flush();
                                              });
  Shared::Ended ended;
  {
    const std::lock_guard<std::timed_mutex> lock(shared_->mutex);
    if (shared_->closed) throw_closed();
    shared_->submit(work, std::move(job), device, timeout, ended);
  }
  Shared::complete(ended);
  return work;
}

void StreamEngine::flush() { shared_->flush(); }

void StreamEngine::shutdown() {
  shared_->closed = true;
  shared_->flush_within(grace_.shutdown);
}

void StreamEngine::abort() {
  shared_->closed = true;
  shared_->aborted = true;
  shared_->flush_within(grace_.abort);
}

void StreamEngine::wait_for_end(c10::Device device) {
  shared_->flush();
  const std::lock_guard<std::timed_mutex> lock(shared_->mutex);
  const auto side = shared_->side_streams.find(device.index());
  if (side == shared_->side_streams.end()) return;
  const c10::Stream current = current_stream(device);
  record(side->second.behind).block(current);
  record(side->second.ahead).block(current);
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/named_tensors.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "compressor/streams.h"
#include "engine/work.h"
#include "model/parameter_layout.h"

namespace powersgd {
namespace {

// A buffer that is reduced, and the tensors that it was packed from.
struct Packed {
  at::Tensor buffer;
  std::vector<at::Tensor> tensors;  // empty: the buffer is the memory of the tensors
};

// The works of all buckets. Waiting also copies the means from the buffers to the tensors.
class UnpackingWork final : public CombinedWork {
 public:
  UnpackingWork(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<Packed> buckets,
                std::vector<at::Tensor> tensors, NamedTensors::FindAbsent find_absent)
      : CombinedWork(std::move(works), std::move(tensors)),
        buckets_(std::move(buckets)),
        find_absent_(std::move(find_absent)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    try {
      CombinedWork::wait(timeout);
    } catch (const c10::DistBackendError&) {
      throw;  // the group has ended here
    } catch (const std::exception& error) {
      const bool failed = exception() != nullptr;  // not only this wait
      const std::string absent = failed && find_absent_ ? find_absent_() : "";
      if (absent.empty()) throw;
      C10_THROW_ERROR(DistBackendError, absent + ": " + error.what());
    }
    unpack();
    return true;
  }

  void synchronize() override { wait(kNoTimeout); }

 private:
  void unpack() {
    const at::NoGradGuard no_grad;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Packed& bucket : std::exchange(buckets_, {})) {
      use_on_current_stream(bucket.buffer);
      int64_t offset = 0;
      for (const at::Tensor& tensor : bucket.tensors) {
        tensor.copy_(bucket.buffer.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
        offset += tensor.numel();
      }
    }
  }

  std::mutex mutex_;  // guards the buckets: a future is completed on a thread of its own
  std::vector<Packed> buckets_;
  const NamedTensors::FindAbsent find_absent_;
};

// Returns the memory of tensors that lie side by side in one storage, in this order, as one tensor.
std::optional<at::Tensor> memory_of(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  int64_t end = first.storage_offset();
  for (const at::Tensor& tensor : tensors) {
    const bool follows = tensor.is_contiguous() && tensor.storage_offset() == end &&
                         tensor.storage().is_alias_of(first.storage());
    if (!follows) return std::nullopt;
    end += tensor.numel();
  }
  return first.as_strided({end - first.storage_offset()}, {1});
}

Packed pack(std::vector<at::Tensor> tensors) {
  if (std::optional<at::Tensor> memory = memory_of(tensors)) return {*std::move(memory), {}};
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape(-1));
  return {at::cat(flat), std::move(tensors)};
}

void check(const at::Tensor& tensor, const at::Tensor& attached, const std::string& name) {
  const auto describe = [](const at::Tensor& of) {
    return c10::str(of.scalar_type(), " ", of.sizes(), " on ", of.device());
  };
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && tensor.sizes() == attached.sizes() &&
          tensor.scalar_type() == attached.scalar_type() && tensor.device() == attached.device(),
      "'", name, "' must be ", describe(attached), " as in attach, got ", describe(tensor));
}

std::vector<std::vector<size_t>> assign(const NamedParameters& parameters, size_t bytes) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < parameters.size(); ++i) tensors.push_back(parameters[i]);
  return std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, {bytes}));
}

}  // namespace

NamedTensors::NamedTensors(std::shared_ptr<BucketReducer> reducer, size_t bucket_bytes)
    : reducer_(std::move(reducer)),
      buckets_(assign(reducer_->states()->parameters(), bucket_bytes)) {}

c10::intrusive_ptr<c10d::Work> NamedTensors::all_reduce(const std::vector<at::Tensor>& tensors,
                                                        FindAbsent find_absent) {
  return reduce(tensors, reducer_->session().size(), std::move(find_absent));
}

c10::intrusive_ptr<c10d::Work> NamedTensors::sum(const std::vector<at::Tensor>& tensors) {
  return reduce(tensors, /*divisor=*/1, nullptr);
}

c10::intrusive_ptr<c10d::Work> NamedTensors::reduce(const std::vector<at::Tensor>& tensors,
                                                    int divisor, FindAbsent find_absent) {
  const NamedParameters& attached = reducer_->states()->parameters();
  TORCH_CHECK_VALUE(tensors.size() == attached.size(), "all_reduce takes the ", attached.size(),
                    " tensors that were attached, got ", tensors.size());
  std::vector<at::Tensor> reals;
  for (const at::Tensor& tensor : as_reals(tensors)) reals.push_back(tensor.detach());
  for (size_t i = 0; i < reals.size(); ++i) check(reals[i], attached[i], attached.names()[i]);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<Packed> packed;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    std::vector<at::Tensor> bucket;
    for (const size_t index : buckets_[i]) bucket.push_back(reals[index]);
    packed.push_back(pack(std::move(bucket)));
    works.push_back(reducer_->reduce(i, packed.back().buffer, buckets_[i], divisor,
                                     /*more_follow=*/i + 1 < buckets_.size()));
  }
  reducer_->end_step();
  return c10::make_intrusive<UnpackingWork>(std::move(works), std::move(packed), tensors,
                                            std::move(find_absent));
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "powersgd/model/bucket_reducer.h"

namespace powersgd {

// Purpose: averages tensors that are known by name, for custom training loops, in buckets that
// overlap like DDP's. Tensors of a bucket that lie side by side in one storage, in their order, are
// reduced where they are. Others are copied there and back.
//
// Contract: every rank reduces the same tensors in the same order.
//
// Ownership: shares the reducer of the buckets.
//
// Threads: one at a time.
class NamedTensors {
 public:
  // Returns which ranks have not made a call that has failed on this one, or nothing.
  using FindAbsent = std::function<std::string()>;

  // A bucket holds tensors of one dtype and device, `bucket_bytes` in total or slightly more.
  NamedTensors(std::shared_ptr<BucketReducer> reducer, size_t bucket_bytes);

  // The indices of the tensors of each bucket.
  const std::vector<std::vector<size_t>>& buckets() const { return buckets_; }

  // Replaces each tensor with its mean over ranks, and ends a step. The tensors are those of
  // attach, in the same order. They hold the means once the caller has waited for the Work. Throws
  // before anything is sent if a shape, dtype or device differs. If the reduction fails, waiting
  // for it calls `find_absent`, if there is one, and its answer becomes part of the error.
  c10::intrusive_ptr<c10d::Work> all_reduce(const std::vector<at::Tensor>& tensors,
                                            FindAbsent find_absent = nullptr);
  // Replaces each tensor with its sum over the ranks, for a caller that does the averaging itself.
  c10::intrusive_ptr<c10d::Work> sum(const std::vector<at::Tensor>& tensors);

 private:
  c10::intrusive_ptr<c10d::Work> reduce(const std::vector<at::Tensor>& tensors, int divisor,
                                        FindAbsent find_absent);

  const std::shared_ptr<BucketReducer> reducer_;
  const std::vector<std::vector<size_t>> buckets_;
};

}  // namespace powersgd

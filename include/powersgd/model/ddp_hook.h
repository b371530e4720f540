// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <optional>
#include <vector>

#include "powersgd/model/bucket_reducer.h"

namespace c10d {
class ProcessGroup;
class Reducer;
}  // namespace c10d

namespace powersgd {

// Purpose: averages the buckets of one DDP module through a BucketReducer, and tells it what only
// DDP knows: the divisor, which parameters were used, and where a pass ends.
//
// Contract: reduce() or sum() is called for every bucket in DDP's order. reduce() throws if the
// reducer's process group has changed since the constructor.
//
// Threads: one at a time, with the reducer's lock held.
class DdpBuckets {
 public:
  DdpBuckets(std::shared_ptr<BucketReducer> buckets, const c10d::Reducer& reducer);

  // If `overlaps`, the result may stay incomplete until the last bucket of the pass is reduced, so
  // buckets overlap on streams.
  c10::intrusive_ptr<c10d::Work> reduce(const c10d::Reducer& reducer, c10d::GradBucket& bucket,
                                        bool overlaps = false);
  // Replaces `buffer`, which holds bucket `number`, with its sum over the ranks, for a hook that
  // does the averaging itself, over another group than the reducer's.
  c10::intrusive_ptr<c10d::Work> sum(const c10d::Reducer& reducer, size_t number,
                                     at::Tensor& buffer);
  bool detached() const { return buckets_->detached(); }

 private:
  c10::intrusive_ptr<c10d::Work> reduce(const c10d::Reducer& reducer, size_t number,
                                        at::Tensor& buffer,
                                        const std::vector<at::Tensor>& parameters, int divisor,
                                        bool overlaps);

  std::shared_ptr<BucketReducer> buckets_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  std::optional<size_t> previous_;  // the last bucket that was reduced in an unfinished pass
};

// Gives DDP's buckets, with their parameters, to a BucketReducer. No Python runs in backward.
//
// Owned by `reducer`, which keeps its first hook forever. Once the hook's BucketReducer is
// detached, another can take its place.
class DdpHook final : public c10d::CppCommHookInterface<DdpBuckets> {
 public:
  DdpHook(std::shared_ptr<BucketReducer> buckets, const c10d::Reducer& reducer);
  ~DdpHook() override;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;

  // Returns the hook of a reducer. Null if it has none of this class.
  static DdpHook* of(const c10d::Reducer& reducer);
  bool detached() const { return state_.detached(); }
  void replace(std::shared_ptr<BucketReducer> buckets);

 private:
  const c10d::Reducer& reducer_;
};

// True if `reducer` gives its buckets to a hook that was not detached.
bool is_attached(const c10d::Reducer& reducer);

// Routes the buckets of `reducer`, which is not attached, to `buckets`. Throws if it has another
// kind of hook.
void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<BucketReducer> buckets);

}  // namespace powersgd

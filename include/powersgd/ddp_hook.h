// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <optional>

#include "powersgd/attached_model.h"

namespace c10d {
class ProcessGroup;
class Reducer;
}  // namespace c10d

namespace powersgd {

// Purpose: averages the buckets of one DDP module by an attached model, and tells it what only DDP
// knows: the divisor, which parameters were used, and where a pass ends.
//
// Contract: reduce() is called for every bucket in DDP's order. It throws if the reducer's process
// group is no longer that of the constructor.
//
// Threads: one at a time, with the reducer's lock held.
class DdpBuckets {
 public:
  DdpBuckets(std::shared_ptr<AttachedModel> model, const c10d::Reducer& reducer);

  // If `overlaps`, the result may stay incomplete until the last bucket of the pass is reduced, so
  // that buckets overlap on streams.
  c10::intrusive_ptr<c10d::Work> reduce(const c10d::Reducer& reducer, c10d::GradBucket& bucket,
                                        bool overlaps = false);

 private:
  const std::shared_ptr<AttachedModel> model_;
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  std::optional<size_t> previous_;  // the last bucket that was reduced in an unfinished pass
};

// Gives DDP's buckets, with their parameters, to an attached model. No Python runs in backward.
//
// Owned by `reducer`.
class DdpHook final : public c10d::CppCommHookInterface<DdpBuckets> {
 public:
  DdpHook(std::shared_ptr<AttachedModel> model, const c10d::Reducer& reducer)
      : CppCommHookInterface({std::move(model), reducer}), reducer_(reducer) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;

 private:
  const c10d::Reducer& reducer_;
};

// Registers the hook. Throws if `reducer` has one already. DDP cannot remove a hook, but
// AttachedModel::set_active can make it average exactly.
void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<AttachedModel> model);

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>

#include "powersgd/attached_model.h"

namespace c10d {
class Reducer;
}

namespace powersgd {

// Averages a bucket of DDP's by an attached model. Called for every bucket in order. The result may
// be waited for at once, so buckets do not overlap on streams as those of a DdpHook do.
c10::intrusive_ptr<c10d::Work> reduce_bucket(AttachedModel& model, const c10d::Reducer& reducer,
                                             c10d::GradBucket& bucket);

// Gives DDP's buckets, with their parameters, to an attached model. No Python runs in backward.
//
// Owned by `reducer`, which calls it with its own lock held.
class DdpHook final : public c10d::CppCommHookInterface<std::shared_ptr<AttachedModel>> {
 public:
  DdpHook(std::shared_ptr<AttachedModel> model, const c10d::Reducer& reducer)
      : CppCommHookInterface(std::move(model)), reducer_(reducer) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;

 private:
  const c10d::Reducer& reducer_;
};

// Registers the hook. Throws if `reducer` has one already. DDP cannot remove a hook, but
// AttachedModel::set_active can make it average exactly.
void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<AttachedModel> model);

}  // namespace powersgd

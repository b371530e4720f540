// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/ddp_hook.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <utility>

namespace powersgd {
namespace {

// DDP divides by the number of ranks, or in join(divide_by_initial_world_size=False) by the number
// of ranks that still have inputs. It computes the divisor before a step's first bucket and gives
// it to no hook, so this class reads the protected member.
class Divisor : public c10d::Reducer {
 public:
  static int of(const c10d::Reducer& reducer) { return reducer.*(&Divisor::div_factor_); }
};

}  // namespace

c10::intrusive_ptr<c10d::Work> reduce_bucket(AttachedModel& model, const c10d::Reducer& reducer,
                                             c10d::GradBucket& bucket) {
  const int divisor = Divisor::of(reducer);
  // It is unset on a rank that has joined, which takes part in the sum and drops the result.
  const int ranks = model.session().size();
  auto work = model.reduce(bucket.getIndex(), bucket.getBufferRef(),
                           model.find(bucket.getParameters()), divisor > 0 ? divisor : ranks);
  if (bucket.isLast()) model.end_step();
  return work;
}

c10::intrusive_ptr<c10::ivalue::Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  return reduce_bucket(*state_, reducer_, bucket)->getFuture();
}

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<AttachedModel> model) {
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(model), reducer));
}

}  // namespace powersgd

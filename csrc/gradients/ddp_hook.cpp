// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/ddp_hook.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <utility>

#include "engine/work.h"

namespace powersgd {
namespace {

// DDP divides by the number of ranks, or in join(divide_by_initial_world_size=False) by the number
// of ranks that still have inputs. It computes the divisor before a step's first bucket and gives
// it to no hook, so this class reads the protected member.
class Divisor : public c10d::Reducer {
 public:
  static int of(const c10d::Reducer& reducer) { return reducer.*(&Divisor::div_factor_); }
};

c10::intrusive_ptr<c10d::Work> reduce(AttachedModel& model, const c10d::Reducer& reducer,
                                      c10d::GradBucket& bucket, bool more_follow) {
  const int divisor = Divisor::of(reducer);
  // It is unset on a rank that has joined, which takes part in the sum and drops the result.
  const int ranks = model.session().size();
  auto work =
      model.reduce(bucket.getIndex(), bucket.getBufferRef(), model.find(bucket.getParameters()),
                   divisor > 0 ? divisor : ranks, more_follow);
  if (bucket.isLast()) model.end_step();
  return work;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> reduce_bucket(AttachedModel& model, const c10d::Reducer& reducer,
                                             c10d::GradBucket& bucket) {
  return reduce(model, reducer, bucket, /*more_follow=*/false);
}

// DDP waits for the futures of a backward pass once it has called the hook with the last bucket,
// which flushes. So the future of an earlier bucket may be left incomplete until then.
c10::intrusive_ptr<c10::ivalue::Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto work = reduce(*state_, reducer_, bucket, /*more_follow=*/!bucket.isLast());
  const auto* stream_work = dynamic_cast<const StreamWork*>(work.get());
  return stream_work != nullptr ? stream_work->future_without_flush() : work->getFuture();
}

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<AttachedModel> model) {
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(model), reducer));
}

}  // namespace powersgd

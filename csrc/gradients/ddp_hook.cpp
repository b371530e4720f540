// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/ddp_hook.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <utility>
#include <vector>

#include "engine/work.h"
#include "powersgd/reducer_members.h"

namespace powersgd {

DdpBuckets::DdpBuckets(std::shared_ptr<AttachedModel> model, const c10d::Reducer& reducer)
    : model_(std::move(model)), group_(ReducerMembers::group(reducer)) {}

c10::intrusive_ptr<c10d::Work> DdpBuckets::reduce(const c10d::Reducer& reducer,
                                                  c10d::GradBucket& bucket, bool overlaps) {
  TORCH_CHECK(group_._unsafe_get_target() == ReducerMembers::group(reducer).get(),
              "powersgd: the process group of this DDP module has changed since attach, which "
              "averages over the former one. Wrap the model in a new DistributedDataParallel over "
              "the new group, and attach that");
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  const size_t number = ReducerMembers::bucket_number(reducer, parameters);
  if (previous_ && number <= *previous_) model_->abandon_step();
  const bool last = ReducerMembers::is_last(reducer, number);
  const int divided_by = ReducerMembers::divisor(reducer);
  auto work = model_->reduce(number, bucket.getBufferRef(), model_->find(parameters),
                             divided_by > 0 ? divided_by : model_->session().size(),
                             /*more_follow=*/overlaps && !last,
                             ReducerMembers::uses(reducer, number, parameters));
  previous_ = last ? std::nullopt : std::optional(number);
  if (last) model_->end_step();
  return work;
}

// DDP waits for the futures of a backward pass once it has called the hook with the last bucket,
// which flushes. So the future of an earlier bucket may be left incomplete until then.
c10::intrusive_ptr<c10::ivalue::Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto work = state_.reduce(reducer_, bucket, /*overlaps=*/true);
  const auto* stream_work = dynamic_cast<const StreamWork*>(work.get());
  return stream_work != nullptr ? stream_work->future_without_flush() : work->getFuture();
}

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<AttachedModel> model) {
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(model), reducer));
}

}  // namespace powersgd

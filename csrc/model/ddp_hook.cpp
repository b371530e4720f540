// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/ddp_hook.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/work.h"
#include "powersgd/model/reducer_members.h"

namespace powersgd {
namespace {

// The live hooks by reducer, because a reducer's own member is private. Never destroyed, because
// DDP modules may live until the process ends.
std::mutex hooks_mutex;
std::unordered_map<const c10d::Reducer*, DdpHook*>& hooks() {
  static auto* const hooks = new std::unordered_map<const c10d::Reducer*, DdpHook*>;
  return *hooks;
}

}  // namespace

DdpBuckets::DdpBuckets(std::shared_ptr<BucketReducer> buckets, const c10d::Reducer& reducer)
    : buckets_(std::move(buckets)), group_(ReducerMembers::group(reducer)) {}

c10::intrusive_ptr<c10d::Work> DdpBuckets::reduce(const c10d::Reducer& reducer,
                                                  c10d::GradBucket& bucket, bool overlaps) {
  TORCH_CHECK(group_._unsafe_get_target() == ReducerMembers::group(reducer).get(),
              "powersgd: the process group of this DDP module has changed since attach, but its "
              "gradients are still averaged over the former one. Wrap the model in a new "
              "DistributedDataParallel over the new group, and attach it with previous=");
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  const int divided_by = ReducerMembers::divisor(reducer);
  return reduce(reducer, ReducerMembers::bucket_number(reducer, parameters), bucket.getBufferRef(),
                parameters, divided_by > 0 ? divided_by : buckets_->session().size(), overlaps);
}

c10::intrusive_ptr<c10d::Work> DdpBuckets::sum(const c10d::Reducer& reducer, size_t number,
                                               at::Tensor& buffer) {
  return reduce(reducer, number, buffer, ReducerMembers::parameters_of(reducer, number),
                /*divisor=*/1, /*overlaps=*/false);
}

c10::intrusive_ptr<c10d::Work> DdpBuckets::reduce(const c10d::Reducer& reducer, size_t number,
                                                  at::Tensor& buffer,
                                                  const std::vector<at::Tensor>& parameters,
                                                  int divisor, bool overlaps) {
  if (previous_ && number <= *previous_) buckets_->abandon_step();
  const bool last = ReducerMembers::is_last(reducer, number);
  auto work = buckets_->reduce(
      number, buffer, buckets_->states()->parameters().find(parameters), divisor,
      /*more_follow=*/overlaps && !last, ReducerMembers::uses(reducer, number, parameters));
  previous_ = last ? std::nullopt : std::optional(number);
  if (last) buckets_->end_step();
  return work;
}

DdpHook::DdpHook(std::shared_ptr<BucketReducer> buckets, const c10d::Reducer& reducer)
    : CppCommHookInterface({std::move(buckets), reducer}), reducer_(reducer) {
  const std::lock_guard<std::mutex> lock(hooks_mutex);
  hooks().emplace(&reducer, this);
}

DdpHook::~DdpHook() {
  const std::lock_guard<std::mutex> lock(hooks_mutex);
  const auto own = hooks().find(&reducer_);
  if (own != hooks().end() && own->second == this) hooks().erase(own);
}

DdpHook* DdpHook::of(const c10d::Reducer& reducer) {
  const std::lock_guard<std::mutex> lock(hooks_mutex);
  const auto found = hooks().find(&reducer);
  return found != hooks().end() ? found->second : nullptr;
}

void DdpHook::replace(std::shared_ptr<BucketReducer> buckets) {
  state_ = DdpBuckets(std::move(buckets), reducer_);
}

// DDP waits for the futures of a backward pass once it has called the hook with the last bucket,
// which flushes. So an earlier bucket's future may stay incomplete until then.
c10::intrusive_ptr<c10::ivalue::Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto work = state_.reduce(reducer_, bucket, /*overlaps=*/true);
  const auto* stream_work = dynamic_cast<const StreamWork*>(work.get());
  return stream_work != nullptr ? stream_work->future_without_flush() : work->getFuture();
}

bool is_attached(const c10d::Reducer& reducer) {
  const DdpHook* const hook = DdpHook::of(reducer);
  return hook != nullptr && !hook->detached();
}

void register_ddp_hook(c10d::Reducer& reducer, std::shared_ptr<BucketReducer> buckets) {
  TORCH_INTERNAL_ASSERT(!is_attached(reducer));
  if (DdpHook* const hook = DdpHook::of(reducer)) {
    hook->replace(std::move(buckets));
  } else {
    reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(buckets), reducer));
  }
}

}  // namespace powersgd

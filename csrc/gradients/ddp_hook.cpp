// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/ddp_hook.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/work.h"

namespace powersgd {
namespace {

// DDP gives a hook its buckets alone. This class reads the rest from protected members.
class ReducerState : public c10d::Reducer {
 public:
  // The divisor is the number of ranks, or in join(divide_by_initial_world_size=False) the number
  // of ranks that still have inputs. DDP computes it before a step's first bucket. It is unset on a
  // rank that has joined, which takes part in the sum and drops the result.
  static int divisor(const c10d::Reducer& reducer, int ranks) {
    const int divisor = reducer.*(&ReducerState::div_factor_);
    return divisor > 0 ? divisor : ranks;
  }

  static const c10::intrusive_ptr<c10d::ProcessGroup>& group(const c10d::Reducer& reducer) {
    return reducer.*(&ReducerState::process_group_);
  }

  // DDP drops the output of a parameter that no rank has used since the last synchronization. It
  // looks for them with find_unused_parameters and in a static graph. The bucket then holds what
  // .grad held before the pass.
  static std::vector<Use> uses(const c10d::Reducer& reducer, c10d::GradBucket& bucket) {
    const bool looks_for_unused = reducer.*(&ReducerState::find_unused_parameters_) ||
                                  reducer.*(&ReducerState::static_graph_);
    if (!looks_for_unused) return {};
    const auto used = (reducer.*(&ReducerState::local_used_map_)).accessor<int32_t, 1>();
    const auto& buckets = reducer.*(&ReducerState::buckets_);
    const std::vector<size_t>& indices = buckets[bucket.getIndex()].variable_indices;
    const std::vector<at::Tensor> parameters = bucket.getParameters();
    std::vector<Use> uses;
    for (size_t i = 0; i < indices.size(); ++i) {
      const bool stale = parameters[i].grad().defined();
      const bool is_used = used[static_cast<int64_t>(indices[i])] != 0;
      uses.push_back(is_used ? Use::kUsed : stale ? Use::kStale : Use::kUnused);
    }
    const bool all =
        std::all_of(uses.begin(), uses.end(), [](Use use) { return use == Use::kUsed; });
    return all ? std::vector<Use>{} : uses;
  }

  // True if DDP reduces no bucket after this one in the pass. With skip_all_reduce_unused_params it
  // leaves out those of which every parameter is unused.
  static bool is_last(const c10d::Reducer& reducer, const c10d::GradBucket& bucket) {
    if (bucket.isLast()) return true;
    if (!(reducer.*(&ReducerState::skip_all_reduce_unused_params_))) return false;
    const auto& buckets = reducer.*(&ReducerState::buckets_);
    const std::vector<size_t>& unused = reducer.*(&ReducerState::unused_parameters_);
    const auto is_unused = [&](size_t index) {
      return std::find(unused.begin(), unused.end(), index) != unused.end();
    };
    const auto next = buckets.begin() + static_cast<std::ptrdiff_t>(bucket.getIndex()) + 1;
    return std::all_of(next, buckets.end(), [&](const auto& later) {
      const std::vector<size_t>& indices = later.variable_indices;
      return std::all_of(indices.begin(), indices.end(), is_unused);
    });
  }
};

}  // namespace

DdpBuckets::DdpBuckets(std::shared_ptr<AttachedModel> model, const c10d::Reducer& reducer)
    : model_(std::move(model)), group_(ReducerState::group(reducer)) {}

c10::intrusive_ptr<c10d::Work> DdpBuckets::reduce(const c10d::Reducer& reducer,
                                                  c10d::GradBucket& bucket, bool overlaps) {
  TORCH_CHECK(group_._unsafe_get_target() == ReducerState::group(reducer).get(),
              "powersgd: the process group of this DDP module has changed since attach, which "
              "averages over the former one. Wrap the model in a new DistributedDataParallel over "
              "the new group, and attach that");
  const size_t index = bucket.getIndex();
  // DDP reduces the buckets of a pass in the order of their numbers.
  if (previous_ && index <= *previous_) model_->abandon_step();
  const bool last = ReducerState::is_last(reducer, bucket);
  auto work =
      model_->reduce(index, bucket.getBufferRef(), model_->find(bucket.getParameters()),
                     ReducerState::divisor(reducer, model_->session().size()),
                     /*more_follow=*/overlaps && !last, ReducerState::uses(reducer, bucket));
  previous_ = last ? std::nullopt : std::optional(index);
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

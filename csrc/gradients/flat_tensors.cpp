// SPDX-License-Identifier: BSD-3-Clause
#include "gradients/flat_tensors.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "powersgd/scope_override.h"

namespace powersgd {
namespace {

// A state that so many passes have not used belongs to a layout that is gone (DDP rebuilds its
// buckets after the first steps).
constexpr uint64_t kKeepPasses = 100;

// DDP rebuilds its buckets once, after the first step or with static_graph the second: the same
// number of elements in another order. A flat gradient is compressed from its third pass on, so
// that no residual is left behind in an order that is gone.
constexpr uint64_t kSettlePasses = 2;

// Compressors without memory that are kept for the next tensor of their shape.
constexpr size_t kKeepStateless = 64;

bool eligible(const std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1) return false;
  const at::Tensor& tensor = tensors.front();
  const c10d::ReduceOp::RedOpType op = opts.reduceOp;
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && tensor.numel() > 0 &&
         is_compressible(tensor.scalar_type()) && has_kernels(tensor.device().type()) &&
         (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG);
}

}  // namespace

bool FlatTensors::Less::operator()(const Key& a, const Key& b) const {
  const auto rank = [](const Key& key) {
    const c10::Device device = std::get<3>(key);
    return std::make_tuple(std::get<0>(key), std::cref(std::get<1>(key)),
                           static_cast<int>(std::get<2>(key)), static_cast<int>(device.type()),
                           static_cast<int>(device.index()));
  };
  return rank(a) < rank(b);
}

FlatTensors::Pass FlatTensors::current_pass(const at::Tensor& tensor) const {
  const std::optional<CompressionOverride> override = current_override();
  if (override && !override->enabled) return {Mode::kNone, 0};
  const int graph_task = torch::autograd::get_current_graph_task_id();
  const bool everything = override || options_.scope == Scope::kAlways;
  const bool flat_gradient = options_.scope == Scope::kBackward && graph_task >= 0 &&
                             tensor.dim() == 1 && tensor.numel() >= options_.min_numel;
  if (!everything && !flat_gradient) return {Mode::kNone, 0};
  if (graph_task >= 0) return {Mode::kBackward, graph_task};
  if (override) return {Mode::kBlock, override->block};
  return {Mode::kStateless, 0};
}

BucketPlan FlatTensors::make_plan(const at::Tensor& tensor) const {
  if (tensor.dim() < 2) return plan_flat(tensor.numel(), options_);
  return plan_bucket({{tensor.sizes().vec(), tensor.strides().vec()}}, options_);
}

std::vector<ParameterStatePtr> FlatTensors::make_states(const BucketPlan& plan, int64_t order) {
  std::vector<ParameterStatePtr> states;
  for (size_t i = 0; i < plan.matrices.size(); ++i) {
    states.push_back(std::make_shared<ParameterState>(static_cast<uint64_t>(order)));
  }
  return states;
}

std::shared_ptr<BucketCompressor> FlatTensors::make_compressor(
    const BucketPlan& plan, const at::Tensor& tensor, std::vector<ParameterStatePtr> states,
    bool remembers) const {
  Options options = options_;
  options.use_error_feedback = options_.use_error_feedback && remembers;
  options.warm_start = options_.warm_start && remembers;
  // Tensors that look alike share Q, which here would be part of their residuals.
  options.alternating = false;
  return powersgd::make_compressor(plan, std::move(states), options, tensor.scalar_type(),
                                   tensor.device(), step_counter_);
}

std::vector<Replica> FlatTensors::replicas(const at::Device& device) const {
  std::vector<Replica> found;
  for (const auto& [key, entry] : entries_) {
    if (std::get<3>(key) != device) continue;
    const std::string name = c10::str("flat tensor ", std::get<0>(key), " of a pass, ",
                                      c10::IntArrayRef(std::get<1>(key)));
    for (const ParameterStatePtr& state : entry.states) found.push_back({name, state, false});
  }
  return found;
}

// Null until it is made. To be called in the passes before, too: it learns which buffers there are.
std::shared_ptr<BucketCompressor>& FlatTensors::find_compressor(Entry& entry,
                                                                const at::Tensor& tensor) {
  const size_t slot = entry.slots.find(tensor);
  entry.compressors.resize(entry.slots.size());
  return entry.compressors[slot];
}

// It remembers nothing, but its tables and payloads are there already.
std::shared_ptr<BucketCompressor> FlatTensors::find_stateless(const BucketPlan& plan,
                                                              const at::Tensor& tensor) {
  const Key key{0, tensor.sizes().vec(), tensor.scalar_type(), tensor.device()};
  const auto known = stateless_.find(key);
  if (known != stateless_.end()) return known->second;
  if (stateless_.size() >= kKeepStateless) stateless_.clear();
  return stateless_[key] =
             make_compressor(plan, tensor, make_states(plan, /*order=*/0), /*remembers=*/false);
}

// Returns how many states were dropped.
int64_t FlatTensors::begin_pass(const Pass& pass) {
  pass_ = pass;
  ++passes_;
  order_ = 0;
  int64_t dropped = 0;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool stale = entry->second.last_pass + kKeepPasses < passes_;
    if (stale && !entry->second.states.empty()) ++dropped;
    entry = stale ? entries_.erase(entry) : std::next(entry);
  }
  return dropped;
}

std::optional<FlatTensors::Admitted> FlatTensors::admit(const std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  if (!eligible(tensors, opts)) return std::nullopt;
  const at::Tensor& tensor = tensors.front();
  const Pass pass = current_pass(tensor);
  if (pass.first == Mode::kNone) return std::nullopt;
  const BucketPlan plan = make_plan(tensor);
  if (!plan.compresses()) return std::nullopt;

  const std::lock_guard<std::mutex> lock(mutex_);
  Admitted admitted;
  const auto warm_up = static_cast<uint64_t>(options_.start_powerSGD_iter);
  if (pass.first == Mode::kStateless) {
    admitted.step = stateless_calls_++;
    admitted.stateless = true;
    admitted.new_pass = true;
    if (admitted.step >= warm_up) admitted.compressor = find_stateless(plan, tensor);
    return admitted;
  }
  if (pass != pass_) {
    admitted.dropped = begin_pass(pass);
    admitted.new_pass = true;
    const auto every = static_cast<uint64_t>(options_.check_every);
    if (every > 0 && (passes_ - 1) % every == 0) admitted.to_check = replicas(tensor.device());
  }
  admitted.step = passes_ - 1;
  const int64_t order = order_++;
  Entry& entry = entries_[{order, tensor.sizes().vec(), tensor.scalar_type(), tensor.device()}];
  entry.last_pass = passes_;
  const bool may_move = pass.first == Mode::kBackward && tensor.dim() == 1;
  const bool settled = !may_move || entry.uses >= kSettlePasses;
  ++entry.uses;
  std::shared_ptr<BucketCompressor>& compressor = find_compressor(entry, tensor);
  if (admitted.step < warm_up || !settled) return admitted;
  if (!compressor) {
    std::vector<ParameterStatePtr> states = make_states(plan, order);
    if (entry.states.empty()) {
      entry.states = states;
    } else {
      for (size_t i = 0; i < states.size(); ++i) states[i]->shares_q_of = entry.states[i];
    }
    compressor = make_compressor(plan, tensor, std::move(states), /*remembers=*/true);
  }
  admitted.compressor = compressor;
  admitted.first_flat = pass.first == Mode::kBackward && !std::exchange(advised_, true);
  return admitted;
}

bool FlatTensors::looks_joined(const std::vector<at::Tensor>& tensors,
                               const c10d::AllreduceOptions& opts) {
  if (options_.scope != Scope::kBackward || !opts.asyncOp || !eligible(tensors, opts)) return false;
  const at::Tensor& tensor = tensors.front();
  if (tensor.dim() != 1 || tensor.numel() < options_.min_numel) return false;
  if (current_override() || torch::autograd::get_current_graph_task_id() >= 0) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool known = std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return std::get<1>(entry.first) == tensor.sizes() &&
           std::get<2>(entry.first) == tensor.scalar_type();
  });
  return known && !std::exchange(looked_joined_, true);
}

}  // namespace powersgd

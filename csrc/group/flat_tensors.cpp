// SPDX-License-Identifier: BSD-3-Clause
#include "group/flat_tensors.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "compressor/device_stages.h"
#include "powersgd/group/scope_override.h"

namespace powersgd {
namespace {

// DDP rebuilds its buckets after the first steps. A state that has been unused for this many passes
// belongs to a layout that is gone.
constexpr uint64_t kKeepPasses = 100;

// DDP rebuilds its buckets once, after the first step or with static_graph the second: the same
// number of elements in another order. A flat gradient is compressed from its third pass on, so no
// residual is left in the old order.
constexpr uint64_t kSettlePasses = 2;

// Buffers remembered per entry: the number of look-alike models we can distinguish.
constexpr size_t kKeepBuffers = 16;

bool eligible(const std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1) return false;
  const at::Tensor& tensor = tensors.front();
  const c10d::ReduceOp::RedOpType op = opts.reduceOp;
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && tensor.numel() > 0 &&
         is_compressible(tensor.scalar_type()) && has_kernels(tensor.device().type()) &&
         (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG);
}

// Notes where the entry's tensor is. True if it was there before, and elsewhere in between.
bool comes_back(std::vector<BufferPlace>& buffers, const at::Tensor& tensor) {
  const auto known = std::find_if(buffers.begin(), buffers.end(),
                                  [&](const BufferPlace& place) { return place.is_of(tensor); });
  if (known != buffers.end()) return known != buffers.end() - 1;
  buffers.emplace_back(tensor);
  if (buffers.size() > kKeepBuffers) buffers.erase(buffers.begin());
  return false;
}

}  // namespace

FlatTensors::FlatTensors(std::shared_ptr<Session> session)
    : session_(std::move(session)),
      options_(session_->options()),
      step_counter_(session_->stats()->make_step_counter()) {}

c10::intrusive_ptr<c10d::Work> FlatTensors::reduce(const std::vector<at::Tensor>& tensors,
                                                   const c10d::AllreduceOptions& opts) {
  if (session_->size() == 1) return nullptr;
  std::optional<Admitted> admitted = admit(tensors, opts);
  if (!admitted) {
    warn_if_joined(tensors, opts);
    return nullptr;
  }
  const at::Tensor& tensor = tensors.front();
  const bool captured = is_capturing(tensor.device());
  if (admitted->new_pass) session_->end_step(*session_->stats(), options_, captured);
  if (!admitted->to_check.empty() && !captured) {
    session_->check_replicas(std::move(admitted->to_check), tensor.device(), session_->stats());
  }
  report(*admitted, tensor);
  if (admitted->to_prepare) {
    session_->run_after_steps(tensor.device(), [&] { admitted->to_prepare->prepare(); });
  }
  if (!admitted->compressor) {
    session_->count_exact(static_cast<int64_t>(tensor.nbytes()), *session_->stats());
    return nullptr;
  }
  if (!admitted->to_drop.empty()) {
    auto work =
        session_->start_after_steps(tensor.device(), [states = std::move(admitted->to_drop)] {
          for (const ParameterStatePtr& state : states) state->drop_residual();
        });
    session_->leave_unwatched(work, tensor.device());
  }
  const bool average = opts.reduceOp == c10d::ReduceOp::AVG;
  admitted->step.output_scale = average ? 1.0 / session_->size() : 1.0;
  return session_->allreduce_compressed(admitted->compressor, tensor, admitted->step,
                                        session_->stats(), opts.timeout);
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
  Admitted admitted = admit_in_pass(tensor, plan, pass);
  if (admitted.compressor && is_capturing(tensor.device())) captured_.insert(admitted.compressor);
  return admitted;
}

bool FlatTensors::takes_flat_gradients() const {
  return options_.scope == Scope::kBackward && !session_->was_attached();
}

FlatTensors::Pass FlatTensors::current_pass(const at::Tensor& tensor) const {
  const std::optional<ScopeOverride> override = current_override();
  if (override && !override->enabled) return {Mode::kNone, 0};
  const int graph_task = torch::autograd::get_current_graph_task_id();
  const bool flat_gradient = takes_flat_gradients() && graph_task >= 0 && tensor.dim() == 1 &&
                             tensor.numel() >= options_.min_numel;
  if (!override && !flat_gradient) return {Mode::kNone, 0};
  if (graph_task >= 0) return {Mode::kBackward, graph_task};
  return {Mode::kBlock, override->block};
}

FlatTensors::Admitted FlatTensors::admit_in_pass(const at::Tensor& tensor, const BucketPlan& plan,
                                                 const Pass& pass) {
  Admitted admitted;
  if (pass != pass_) {
    admitted.dropped = begin_pass(pass);
    admitted.new_pass = true;
    const auto every = static_cast<uint64_t>(options_.check_every);
    if (every > 0 && (passes_ - 1) % every == 0) admitted.to_check = replicas(tensor.device());
  }
  admitted.step.step = passes_ - 1;
  const int64_t order = order_++;
  admitted.step.bucket = order;
  Entry& entry = entries_[{order, tensor.sizes().vec(), tensor.scalar_type(), tensor.device()}];
  entry.last_pass = passes_;
  entry.takes_turns = comes_back(entry.buffers, tensor) || entry.takes_turns;
  const bool may_move = pass.first == Mode::kBackward && tensor.dim() == 1;
  const bool settled = !may_move || entry.uses >= kSettlePasses;
  ++entry.uses;
  if (!settled) return admitted;
  if (!entry.compressor) {
    entry.states = make_states(plan, order);
    entry.compressor =
        make_compressor(plan, entry.states, options_, tensor.scalar_type(), tensor.device(),
                        session_->ranks_on(tensor.device()), step_counter_);
    admitted.to_prepare = entry.compressor;
  }
  if (admitted.step.step < static_cast<uint64_t>(options_.start_powerSGD_iter)) return admitted;
  admitted.compressor = entry.compressor;
  if (entry.takes_turns) admitted.to_drop = entry.states;
  admitted.first_turn = entry.takes_turns && !std::exchange(warned_of_turns_, true);
  admitted.first_flat =
      pass.first == Mode::kBackward && !session_->was_attached() && !std::exchange(advised_, true);
  return admitted;
}

// Returns how many states were dropped.
int64_t FlatTensors::begin_pass(const Pass& pass) {
  pass_ = pass;
  ++passes_;
  order_ = 0;
  int64_t dropped = 0;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool stale = entry->second.last_pass + kKeepPasses < passes_ &&
                       captured_.count(entry->second.compressor) == 0;
    if (stale && !entry->second.states.empty()) ++dropped;
    entry = stale ? entries_.erase(entry) : std::next(entry);
  }
  return dropped;
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

void FlatTensors::report(const Admitted& admitted, const at::Tensor& tensor) const {
  if (session_->rank() != 0) return;  // all ranks decide alike
  if (admitted.dropped > 0) {
    session_->log(LogLevel::kInfo, c10::str("dropped the state of ", admitted.dropped,
                                            " flat tensors that have not been reduced recently"));
  }
  if (admitted.first_flat) {
    session_->log(
        LogLevel::kWarning,
        c10::str(
            "compression starts at step ", admitted.step.step, ", matrix rank ",
            options_.matrix_approximation_rank, ": a flat gradient of ", tensor.numel(),
            " elements is compressed as one matrix, because its layers are unknown; "
            "torch_powersgd.attach(ddp) compresses layer by layer, which is more accurate. For a "
            "baseline of exact averages, create the group without powersgd. If this "
            "all-reduce is yours and not DDP's, call it inside "
            "torch_powersgd.scope(\"never\")"));
  }
  if (admitted.first_turn) {
    session_->log(
        LogLevel::kWarning,
        c10::str("several models take turns with flat gradients of ", tensor.numel(),
                 " elements. They are compressed without error feedback, because one model would "
                 "get another's residual: call torch_powersgd.attach(ddp) for each"));
  }
}

void FlatTensors::warn_if_joined(const std::vector<at::Tensor>& tensors,
                                 const c10d::AllreduceOptions& opts) {
  if (!takes_flat_gradients() || !opts.asyncOp || !eligible(tensors, opts)) return;
  const at::Tensor& tensor = tensors.front();
  if (tensor.dim() != 1 || tensor.numel() < options_.min_numel) return;
  if (current_override() || torch::autograd::get_current_graph_task_id() >= 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool known = std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
      return std::get<1>(entry.first) == tensor.sizes() &&
             std::get<2>(entry.first) == tensor.scalar_type();
    });
    if (!known || std::exchange(warned_of_join_, true)) return;
  }
  session_->log(
      LogLevel::kWarning,
      c10::str("a tensor of ", tensor.numel(),
               " elements, the size of a flat gradient, was all-reduced outside of backward, "
               "exactly. If this rank has run out of inputs in DDP's join(), the ranks that "
               "compress wait for it until they time out: call torch_powersgd.attach(ddp), or "
               "train inside torch_powersgd.scope(\"never\")"));
}

bool FlatTensors::Less::operator()(const Key& a, const Key& b) const {
  const auto rank = [](const Key& key) {
    const c10::Device device = std::get<3>(key);
    return std::make_tuple(std::get<0>(key), std::cref(std::get<1>(key)),
                           static_cast<int>(std::get<2>(key)), static_cast<int>(device.type()),
                           static_cast<int>(device.index()));
  };
  return rank(a) < rank(b);
}

}  // namespace powersgd

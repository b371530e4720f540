// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "group/buffer_place.h"
#include "group/replicas.h"
#include "powersgd/group/session.h"

namespace powersgd {

// Purpose: decides which plain allreduces of one group are compressed, and keeps their state.
//
// Contract: a tensor that arrives without an attached model has no name. Its order among the
// eligible tensors of the same pass, its shape and its dtype identify it: they are the same on
// every rank by construction, unlike an address. A pass is one backward pass of autograd, or one
// `scope("always")` block outside of any.
//
// Models that look alike and run backward one after the other share that identity. They share Q,
// which all ranks must agree on, but never a residual: once a rank sees that buffers take turns, it
// drops the residual of each step and warns.
//
// Ownership: owned by the group's BackendPowerSGD, shares its session.
//
// Threads: safe from any thread.
class FlatTensors {
 public:
  explicit FlatTensors(std::shared_ptr<Session> session);

  // Compresses and reduces the tensors. Null if they should be forwarded unchanged.
  c10::intrusive_ptr<c10d::Work> reduce(const std::vector<at::Tensor>& tensors,
                                        const c10d::AllreduceOptions& opts);

 private:
  enum class Mode { kNone, kBackward, kBlock };
  // Mode and identity of the pass that the calling thread is in.
  using Pass = std::pair<Mode, int64_t>;
  // Order in the pass, sizes, dtype, device.
  using Key = std::tuple<int64_t, std::vector<int64_t>, at::ScalarType, c10::Device>;

  struct Entry {
    std::shared_ptr<BucketCompressor> compressor;  // null until the tensor has settled
    std::vector<ParameterStatePtr> states;         // the compressor's
    std::vector<BufferPlace> buffers;              // the tensors seen, the last one last
    bool takes_turns = false;                      // a buffer came back after another one
    uint64_t last_pass = 0;
    uint64_t uses = 0;
  };

  // The decision on a tensor that scope and override admit.
  struct Admitted {
    std::shared_ptr<BucketCompressor> compressor;  // null: not yet, average exactly
    std::shared_ptr<BucketCompressor> to_prepare;  // null unless it was made for this tensor
    StepInfo step;
    bool new_pass = false;
    bool first_flat = false;        // the first compressed in backward: time to advise attach
    bool first_turn = false;        // buffers were first seen to take turns: time to warn
    int64_t dropped = 0;            // states dropped because long unused
    std::vector<Replica> to_check;  // before this call; on its device
    std::vector<ParameterStatePtr> to_drop;  // their residuals belong to another tensor
  };

  struct Less {
    bool operator()(const Key& a, const Key& b) const;
  };

  std::optional<Admitted> admit(const std::vector<at::Tensor>& tensors,
                                const c10d::AllreduceOptions& opts);
  Admitted admit_in_pass(const at::Tensor& tensor, const BucketPlan& plan, const Pass& pass);
  // True if a large flat tensor that is reduced in backward counts as a gradient. Once a model was
  // attached in the group, gradients have names, and a tensor without one belongs to other code.
  bool takes_flat_gradients() const;
  Pass current_pass(const at::Tensor& tensor) const;
  BucketPlan make_plan(const at::Tensor& tensor) const;
  static std::vector<ParameterStatePtr> make_states(const BucketPlan& plan, int64_t order);
  int64_t begin_pass(const Pass& pass);
  std::vector<Replica> replicas(const at::Device& device) const;
  void report(const Admitted& admitted, const at::Tensor& tensor) const;
  void warn_if_joined(const std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts);

  const std::shared_ptr<Session> session_;
  const Options& options_;  // the session's
  const std::shared_ptr<StepCounter> step_counter_;

  std::mutex mutex_;  // guards the members below
  std::map<Key, Entry, Less> entries_;
  Pass pass_{Mode::kNone, 0};
  uint64_t passes_ = 0;
  int64_t order_ = 0;
  // The compressors of steps that a CUDA graph holds. A replay uses their memory without passing
  // through here, so they stay.
  std::set<std::shared_ptr<BucketCompressor>> captured_;
  bool advised_ = false;
  bool warned_of_turns_ = false;
  bool warned_of_join_ = false;
};

}  // namespace powersgd

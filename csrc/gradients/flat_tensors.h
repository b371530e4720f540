// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "gradients/buffer_slots.h"
#include "gradients/replicas.h"
#include "powersgd/compressor.h"

namespace powersgd {

// Decides which plain allreduces of one backend are compressed, and keeps their state.
//
// A tensor that arrives without an attached model has no name. It is identified by its order among
// the eligible tensors of the same pass, its shape and its dtype: the same on every rank by
// construction, which an address is not. A pass is one backward pass of autograd, or one
// `compression(True)` block outside of any. A tensor that arrives outside of both cannot be told
// from others of its shape: it is compressed without memory of earlier steps.
//
// Models that look alike and run backward one after the other share that identity, and so Q, which
// all ranks must agree upon. Their residuals, which are this rank's own affair, are kept apart by
// their buffers.
//
// Safe from any thread.
class FlatTensors {
 public:
  FlatTensors(const Options& options, std::shared_ptr<StepCounter> step_counter)
      : options_(options), step_counter_(std::move(step_counter)) {}

  struct Admitted {
    std::shared_ptr<BucketCompressor> compressor;  // null: not yet, average exactly
    uint64_t step = 0;
    bool stateless = false;
    bool new_pass = false;
    bool first_flat = false;        // the first compressed in backward: time to advise attach
    int64_t dropped = 0;            // states dropped because long unused
    std::vector<Replica> to_check;  // before this call; on its device
  };

  // Empty: forward this allreduce as it is.
  std::optional<Admitted> admit(const std::vector<at::Tensor>& tensors,
                                const c10d::AllreduceOptions& opts);

  // Whether a tensor that was not admitted is, by its looks, the bucket of a DDP module whose rank
  // has run out of inputs in join(): zeros that match a gradient of other ranks, which they may
  // compress. True once at the most.
  bool looks_joined(const std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts);

 private:
  enum class Mode { kNone, kBackward, kBlock, kStateless };
  // Mode and identity of the pass that the calling thread is in.
  using Pass = std::pair<Mode, int64_t>;
  // Order in the pass, sizes, dtype, device.
  using Key = std::tuple<int64_t, std::vector<int64_t>, at::ScalarType, c10::Device>;

  struct Entry {
    BufferSlots slots;
    std::vector<std::shared_ptr<BucketCompressor>> compressors;  // by slot
    std::vector<ParameterStatePtr> states;  // of the first compressor: the others share their Q
    uint64_t last_pass = 0;
    uint64_t uses = 0;
  };

  struct Less {
    bool operator()(const Key& a, const Key& b) const;
  };

  Pass current_pass(const at::Tensor& tensor) const;
  BucketPlan make_plan(const at::Tensor& tensor) const;
  static std::vector<ParameterStatePtr> make_states(const BucketPlan& plan, int64_t order);
  std::shared_ptr<BucketCompressor> make_compressor(const BucketPlan& plan,
                                                    const at::Tensor& tensor,
                                                    std::vector<ParameterStatePtr> states,
                                                    bool remembers) const;
  std::shared_ptr<BucketCompressor> find_stateless(const BucketPlan& plan,
                                                   const at::Tensor& tensor);
  static std::shared_ptr<BucketCompressor>& find_compressor(Entry& entry, const at::Tensor& tensor);
  int64_t begin_pass(const Pass& pass);
  std::vector<Replica> replicas(const at::Device& device) const;

  const Options options_;
  const std::shared_ptr<StepCounter> step_counter_;
  mutable std::mutex mutex_;
  std::map<Key, Entry, Less> entries_;
  Pass pass_{Mode::kNone, 0};
  uint64_t passes_ = 0;
  int64_t order_ = 0;
  std::map<Key, std::shared_ptr<BucketCompressor>, Less> stateless_;
  uint64_t stateless_calls_ = 0;
  bool advised_ = false;
  bool looked_joined_ = false;
};

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "powersgd/compressor/workspace.h"
#include "powersgd/group/allreduce_taker.h"
#include "powersgd/group/session.h"
#include "powersgd/model/model_states.h"

namespace powersgd {

// Purpose: averages the buckets of one model, each parameter compressed by its own shape. It keeps
// a compressor for each bucket layout that has been used. The buckets are DDP's, or the shards that
// FSDP2 has reduce-scattered.
//
// Contract: every rank attaches the same parameters with equal options, and reduces the same
// buckets in the same order.
//
// Ownership: owned by the hook that receives the buckets. Owns the parameters' states and shares
// its group's session.
//
// Threads: one thread at a time calls the reductions and end_step(), in the backward pass. The
// user's thread calls everything else, outside the backward pass.
class BucketReducer final : public AllreduceTaker,
                            public std::enable_shared_from_this<BucketReducer> {
 public:
  // If `previous` reduced the same parameters in a former group, the new reducer starts with copies
  // of its states and counts. Changes nothing but connects to the other ranks.
  static std::shared_ptr<BucketReducer> make(const std::shared_ptr<Session>& session,
                                             std::vector<std::string> names,
                                             const std::vector<at::Tensor>& parameters,
                                             Options options,
                                             const BucketReducer* previous = nullptr);
  BucketReducer(std::shared_ptr<Session> session, std::shared_ptr<ModelStates> states);

  // Notes in the session that this is attached. All ranks call it between the same two collectives.
  void note_attached();

  // Replaces `buffer` with its sum over ranks divided by `divisor`: the number of ranks, except in
  // DDP's join. The buffer holds the gradients of `parameters` back to back. If none are named, it
  // is averaged exactly. `bucket` is its number. If `more_follow`, the caller promises to reduce
  // another bucket or to call end_step() in the same backward pass. `uses` says how this rank used
  // the parameters in the pass; empty: it used all.
  c10::intrusive_ptr<c10d::Work> reduce(size_t bucket, at::Tensor& buffer,
                                        const std::vector<size_t>& parameters, int divisor,
                                        bool more_follow = false, std::vector<Use> uses = {});
  // Announces an all-reduce of `buffer` that its owner calls instead of reduce(). The owner then
  // divides the result by `divided_after`. Replaces the previous announcement.
  void expect(size_t bucket, const at::Tensor& buffer, std::vector<size_t> parameters,
              double divided_after);
  bool expects(const at::Tensor& buffer) const override;
  c10::intrusive_ptr<c10d::Work> reduce_expected(const at::Tensor& buffer,
                                                 const c10d::AllreduceOptions& opts) override;
  // Called after the last bucket of a backward pass.
  void end_step();
  // Called instead of end_step() if the pass failed after some buckets, whose outputs nobody got.
  void abandon_step();

  // An inactive reducer averages its buckets exactly.
  void set_active(bool active) { active_ = active && !detached_; }
  bool active() const { return active_; }
  // Makes the reducer permanently inactive, and frees its memory after all submitted steps. Memory
  // that a CUDA graph holds stays.
  void detach();
  bool detached() const { return detached_; }

  const std::shared_ptr<ModelStates>& states() const { return states_; }
  const Session& session() const { return *session_; }

  // This model's counts, like Session's.
  StatsSnapshot snapshot() { return session_->snapshot(*stats_); }
  void reset_stats() { session_->reset_stats(*stats_); }
  // True if its next step is compressed.
  bool compressing() const;
  // The first step that it compresses. Empty if it never compresses.
  std::optional<int64_t> starts_at() const;
  // Like Session::not_started, for this model alone.
  std::string not_started(int64_t soon = 0);

 private:
  struct Bucket {
    bool holds(const at::Tensor& buffer, const std::vector<size_t>& which) const {
      return which == parameters && dtype == buffer.scalar_type() && device == buffer.device();
    }

    std::vector<size_t> parameters;
    at::ScalarType dtype = at::kFloat;
    c10::Device device = at::kCPU;
    std::shared_ptr<BucketCompressor> compressor;  // null if nothing in it is compressed
  };
  struct Expected;
  struct Reduction {
    std::shared_ptr<BucketCompressor> compressor;  // null: exact
    StepInfo step;
  };

  // True if the exact steps are over and it is active.
  bool warm() const { return active_ && states_->step() >= options_.start_powerSGD_iter; }
  std::shared_ptr<BucketCompressor> find_compressor(size_t bucket, const at::Tensor& buffer,
                                                    const std::vector<size_t>& parameters);
  Bucket make_bucket(const at::Tensor& buffer, const std::vector<size_t>& parameters);
  // The workspaces that all buckets on the device share.
  const Workspaces& workspaces_on(c10::Device device);
  // Prepares the buffer for its all-reduce. The mean gradient is the mean of the ranks' buffers
  // divided by `units`.
  Reduction begin(size_t bucket, at::Tensor& buffer, const std::vector<size_t>& parameters,
                  std::vector<Use> uses, double output_scale, double units);
  void warn_of_unknown_parameters();
  void announce_start() const;
  // Samples and checks the states at some steps, on the engines and after the present step.
  void watch(const std::vector<c10::Device>& devices);
  // Keeps an old, non-finite gradient from skipping the step of the whole bucket.
  void clear_stale_non_finite(const at::Tensor& buffer, const std::vector<size_t>& parameters,
                              const std::vector<Use>& uses) const;

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<ModelStates> states_;
  const Options& options_;  // the states'
  const std::shared_ptr<Stats> stats_;
  const std::shared_ptr<StepCounter> step_counter_;
  std::unordered_map<c10::Device, Workspaces> workspaces_;
  std::map<size_t, Bucket> buckets_;  // by the bucket's number
  // The compressors of steps that a CUDA graph holds. A replay uses their memory, even if DDP has
  // rebuilt its buckets since.
  std::set<std::shared_ptr<BucketCompressor>> captured_;
  std::shared_ptr<const Expected> expected_;
  std::atomic<bool> active_ = true;
  std::atomic<bool> detached_ = false;
  std::atomic<bool> said_not_started_ = false;
  bool announced_ = false;
  bool warned_of_unknown_ = false;
};

}  // namespace powersgd

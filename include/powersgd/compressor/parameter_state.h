// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "powersgd/core/options.h"
#include "powersgd/core/plan.h"

namespace powersgd {

// The state that one parameter keeps from step to step.
//
// Purpose: the residual E and the warm start. The residual is E = M - p_hat q_local: `memory` holds
// M, the gradient plus the residual of the last step, and the next project subtracts the product.
//
// Contract: the tensors are allocated once, before the first compressed step. They are not replaced
// while buckets have the state, because kernels hold their addresses. All ranks hold the same
// random_id, p_hat, q_warm and q_norms. The other tensors are each rank's own.
//
// A parameter that travels raw has no tensors here.
//
// Ownership: a state belongs to its parameter and not to a bucket, so a rebuilt bucket keeps its
// residuals.
//
// Threads: one step or one caller at a time. The engine never overlaps jobs that share a state.
struct ParameterState {
  explicit ParameterState(uint64_t random_id = 0) : random_id(random_id) {}

  bool allocated() const { return q_warm.defined(); }
  // True if it is allocated on this device.
  bool is_on(at::Device device) const;

  // A state to allocate, and its matrix.
  struct Layout {
    ParameterState* state;
    MatrixShape shape;
    int64_t rank;
  };
  // Allocates all tensors: q_warm holds a random start, memory_units 1, and the others hold zeros.
  // One launch fills all the random starts. The host does not wait for the device.
  static void allocate(const std::vector<Layout>& layouts, const Options& options,
                       at::Device device);

  // Moves the state to a device, with the same content.
  void move_to(at::Device device);

  // Returns a new tensor, [rows, cols] in float32. It holds zeros without error feedback.
  at::Tensor residual() const;

  // Sets the residual to `value` ([rows, cols]). q_warm stays.
  void set_residual(const at::Tensor& value);

  // Sets the residual to M, because the last step delivered nothing.
  void mark_undelivered();

  // Sets the residual of each of `states` to M if `dropped`, a tensor of one element on their
  // device, is not 0. An undefined tensor stands for 1. The call does not wait for the device.
  static void mark_undelivered(const std::vector<std::shared_ptr<ParameterState>>& states,
                               const at::Tensor& dropped);

  // Sets the residual to 0.
  void drop_residual();

  // A copy in new memory, which the current stream allocates. The original may then be freed.
  ParameterState copy() const;

  // Frees all tensors.
  void release() { *this = ParameterState(random_id); }

  // The tensors that a step changes: p_hat, q_local, q_warm, memory_units, and memory if there
  // is one.
  std::vector<at::Tensor> step_tensors() const;
  // Copies step_tensors() of each state to its `before`, unless that is empty.
  static void keep_before_step(const std::vector<std::shared_ptr<ParameterState>>& states);
  // Restores the state from before the last step. Needs `before`.
  void discard_step();

  // Sets the residual to M - gradient, because the gradient that the last project added was not
  // delivered. A non-finite element counts as 0, as in project.
  void take_back(const at::Tensor& gradient);

  uint64_t random_id = 0;             // names the parameter to the random generator
  std::optional<uint64_t> last_step;  // that was projected; empty: none that can be taken back
  at::Tensor memory;        // [rows, cols] in the residual dtype; undefined without error feedback
  at::Tensor p_hat;         // [rows, rank] in float32
  at::Tensor q_local;       // [rank, cols] in float32
  at::Tensor q_warm;        // [rank, cols] in float32
  at::Tensor memory_units;  // one float64: the loss scale of memory and q_local. project writes it
  at::Tensor q_norms;       // [rank] in float64: the norms of the rows of the last summed Q
  std::vector<at::Tensor> before;  // step_tensors() before the last step; empty: not kept
};
using ParameterStatePtr = std::shared_ptr<ParameterState>;

}  // namespace powersgd

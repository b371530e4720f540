// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <cstdint>
#include <optional>
#include <vector>

#include "powersgd/compressor/compressor.h"

namespace powersgd {

// The facts that only DDP's reducer knows, read from its protected members. Never constructed.
class ReducerMembers : public c10d::Reducer {
 public:
  using Parameters = std::vector<at::Tensor>;

  // The parameters whose gradients DDP reduces: those that were trainable when it was made.
  static const Parameters& parameters(const c10d::Reducer& reducer) {
    return reducer.*(&ReducerMembers::params_);
  }
  // The index of the first of these whose gradients DDP no longer gets. A conversion to another
  // dtype or device, such as module.half(), gives a parameter a new autograd node, without DDP's
  // hook.
  static std::optional<size_t> converted_parameter(const c10d::Reducer& reducer);

  // The number of forward passes whose gradients the module was to reduce.
  static int64_t synchronized_passes(const c10d::Reducer& reducer) {
    return reducer.*(&ReducerMembers::num_iterations_);
  }
  static const c10::intrusive_ptr<c10d::ProcessGroup>& group(const c10d::Reducer& reducer) {
    return reducer.*(&ReducerMembers::process_group_);
  }
  // The number by which DDP divides the sum over ranks: how many ranks there are or, in
  // join(divide_by_initial_world_size=False), how many still have inputs. DDP computes it before a
  // pass's first bucket. It is 0 or less on a rank that has joined, which takes part in the sum and
  // drops the result.
  static int divisor(const c10d::Reducer& reducer) {
    return reducer.*(&ReducerMembers::div_factor_);
  }

  // The number of the bucket of these parameters. DDP reduces the buckets of a pass in the order of
  // their numbers. In the first pass of a static graph, GradBucket::getIndex() is 0 for all.
  static size_t bucket_number(const c10d::Reducer& reducer, const Parameters& parameters);

  // The number of the bucket whose gradients `buffer` holds, and its parameters. Empty: none.
  static std::optional<size_t> bucket_in(const c10d::Reducer& reducer, const at::Tensor& buffer);
  static const Parameters& parameters_of(const c10d::Reducer& reducer, size_t bucket) {
    return (reducer.*(&ReducerMembers::buckets_))[bucket].variables;
  }

  // How this rank has used each parameter of a bucket since the last synchronization. Empty: it has
  // used all. DDP looks for unused parameters with find_unused_parameters and in a static graph,
  // and drops the output of parameters that no rank has used. The bucket holds what .grad held
  // before the pass.
  static std::vector<Use> uses(const c10d::Reducer& reducer, size_t bucket,
                               const Parameters& parameters);

  // True if DDP reduces no bucket after this one in the pass. With skip_all_reduce_unused_params,
  // DDP leaves out buckets whose parameters are all unused.
  static bool is_last(const c10d::Reducer& reducer, size_t bucket);
};

}  // namespace powersgd

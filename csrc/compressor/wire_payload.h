// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace powersgd {

// A payload as it travels: as it is, or rounded to a narrower dtype.
//
// float16 is multiplied by a power of two, so that the largest element comes to 2^11 if it is as
// large as in the step before: a payload may then grow 32-fold in a step. One that overflows
// nonetheless sums to Inf, which skips the step; the scale is then 2^8 times smaller. The scale is
// computed on the device from what was summed, and so is the same on all ranks; the first payload
// travels as it is.
class WirePayload {
 public:
  WirePayload() = default;
  // The elements from `counts_begin` on are counts, which are not scaled. The last of them, if
  // there are any, counts the ranks that met what is not finite: an overflow on the wire is added
  // to it.
  WirePayload(const at::Tensor& payload, at::ScalarType wire, int64_t counts_begin);

  // From now on pack() adds `raw_residual` to `raw`, a part of the payload, and then keeps in it what
  // the wire rounds off of `raw`. Payloads that take turns may share both.
  void carry_rounding(const at::Tensor& raw, const at::Tensor& raw_residual);

  // What is to be summed. The payload is then what this rank sends, rounded.
  at::Tensor& pack();
  // The payload is then the sum.
  void unpack();

  bool rounds() const { return packed_.defined(); }

 private:
  at::Tensor& round();
  void choose_scale();

  at::Tensor payload_;
  at::Tensor values_;  // the payload without its counts
  at::Tensor packed_;  // in the wire's dtype; undefined: nothing is rounded
  at::Tensor scale_;   // one element; undefined: not float16, or not known yet
  bool scaled_ = false;
  at::Tensor raw_, raw_residual_;  // undefined: nothing is carried over
};

}  // namespace powersgd

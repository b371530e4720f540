// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace powersgd {

// A payload on the wire: as it is, or rounded to a narrower dtype.
//
// A float16 payload is multiplied by a scale, a power of two. It takes the largest element to 2^11
// if that is as large as in the step before, so a payload may grow 32-fold in a step. A payload
// that overflows sums to Inf, which skips the step, and the next scale is 2^8 times smaller. The
// device computes the scale from the sum, so it is the same on all ranks. The first payload travels
// as it is.
class WirePayload {
 public:
  WirePayload() = default;
  // The elements from `counts_begin` on are counts, which are not scaled. The last one counts the
  // ranks whose gradient is not finite; unpack() adds 1 to it if the sum is not finite.
  WirePayload(const at::Tensor& payload, at::ScalarType wire, int64_t counts_begin);

  // Makes each pack() add the wire's rounding of `raw`, a part of the payload, to it in the next.
  void carry_rounding(const at::Tensor& raw);
  // Makes the next pack() add nothing to the raw segments.
  void drop_rounding();

  // Returns the tensor to be summed. The payload then holds the rounded values that it sends.
  at::Tensor& pack();
  // Makes the payload the sum.
  void unpack();

  bool rounds() const { return packed_.defined(); }

 private:
  at::Tensor& round();
  void choose_scale();

  at::Tensor payload_;
  at::Tensor values_;          // the payload without its counts
  at::Tensor packed_;          // in the wire's dtype; undefined if nothing is rounded
  at::Tensor scale_;           // one element; undefined before the first sum, and if not scaled_
  bool scaled_ = false;        // true for a float16 wire
  at::Tensor raw_, rounding_;  // undefined if nothing is carried over
};

}  // namespace powersgd

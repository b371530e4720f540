// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/wire_payload.h"

#include <ATen/ATen.h>

namespace powersgd {
namespace {

// The scale takes the largest element to this value. float16 ends at 65504.
constexpr double kTarget = 2048;
constexpr double kAfterOverflow = 1.0 / 256;  // the change of the scale after an overflow

}  // namespace

WirePayload::WirePayload(const at::Tensor& payload, at::ScalarType wire, int64_t counts_begin)
    : payload_(payload),
      values_(payload.narrow(0, 0, counts_begin)),
      scaled_(wire == at::kHalf && payload.scalar_type() != wire) {
  if (wire != payload.scalar_type())
    packed_ = at::empty_like(payload, payload.options().dtype(wire));
}

void WirePayload::carry_rounding(const at::Tensor& raw) {
  raw_ = raw;
  rounding_ = at::zeros_like(raw);
}

void WirePayload::drop_rounding() {
  if (rounding_.defined()) rounding_.zero_();
}

at::Tensor& WirePayload::pack() {
  if (!rounds() || !raw_.defined()) return round();
  const at::Tensor exact = raw_.add_(rounding_).clone();
  at::Tensor& packed = round();
  // An element that overflowed is dropped with the step.
  at::nan_to_num_out(rounding_, exact.sub(raw_), 0, 0, 0);
  return packed;
}

at::Tensor& WirePayload::round() {
  if (!rounds() || (scaled_ && !scale_.defined())) return payload_;
  if (scaled_) values_.mul_(scale_);
  packed_.copy_(payload_);
  payload_.copy_(packed_);
  if (scaled_) values_.div_(scale_);
  return packed_;
}

void WirePayload::unpack() {
  if (!rounds()) return;
  if (!scaled_ || scale_.defined()) payload_.copy_(packed_);
  if (scale_.defined()) values_.div_(scale_);
  if (values_.numel() < payload_.numel()) {
    payload_.narrow(0, payload_.numel() - 1, 1).add_(values_.isfinite().all().logical_not());
  }
  if (scaled_) choose_scale();
}

void WirePayload::choose_scale() {
  const at::Tensor largest = values_.abs().max();
  if (!scale_.defined()) scale_ = at::ones_like(largest);
  // A power of two makes scaling exact; the bounds are well within the range of float32.
  const at::Tensor fitting =
      largest.reciprocal().mul_(kTarget).log2_().floor_().clamp_(-100, 100).exp2_();
  const at::Tensor smaller = scale_.mul(kAfterOverflow).clamp_min_(1e-30);
  const at::Tensor next =
      at::where(largest.isfinite(), at::where(largest.gt(0), fitting, scale_), smaller);
  scale_.copy_(next);
}

}  // namespace powersgd

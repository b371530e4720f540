// SPDX-License-Identifier: BSD-3-Clause
//
// The all-reduces that others make of an attached model's gradients: FSDP2 with replicas.
#include <utility>

#include "gradients/buffer_place.h"
#include "powersgd/attached_model.h"

namespace powersgd {

struct AttachedModel::Expected {
  size_t bucket;
  BufferPlace place;
  std::vector<size_t> parameters;
  double divided_after;
};

void AttachedModel::expect(size_t bucket, const at::Tensor& buffer, std::vector<size_t> parameters,
                           double divided_after) {
  expected_ = std::make_shared<const Expected>(
      Expected{bucket, BufferPlace(buffer), std::move(parameters), divided_after});
}

bool AttachedModel::expects(const at::Tensor& buffer) const {
  return expected_ && expected_->place.is_of(buffer);
}

c10::intrusive_ptr<c10d::Work> AttachedModel::reduce_expected(const at::Tensor& buffer,
                                                              const c10d::AllreduceOptions& opts) {
  const std::shared_ptr<const Expected> expected = std::exchange(expected_, nullptr);
  const bool average = opts.reduceOp == c10d::ReduceOp::AVG;
  if (!average && opts.reduceOp != c10d::ReduceOp::SUM) return nullptr;
  const int ranks = session_->size();
  const double output_scale = average ? 1.0 / ranks : 1.0;
  const double units = expected->divided_after / (ranks * output_scale);
  at::Tensor gradient = buffer;
  const auto [compressor, step] =
      begin(expected->bucket, gradient, expected->parameters, /*uses=*/{}, output_scale, units);
  if (compressor) return session_->allreduce_compressed(compressor, gradient, step, opts.timeout);
  session_->stats().add_exact(static_cast<int64_t>(buffer.nbytes()));
  return nullptr;
}

}  // namespace powersgd

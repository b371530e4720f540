// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/model/outline.h"

#include "model/parameter_layout.h"
#include "powersgd/compressor/traffic.h"

namespace powersgd {

Outline outline_of(const NamedParameters& parameters, const Options& options) {
  Outline outline;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.requires_grad()) continue;
    const int64_t numel = parameter.numel();
    ++outline.parameters;
    outline.numel += numel;
    const ParameterShape shape = parameters.shape(i);
    const SentNumel sent = sent_numel(shape, options);
    if (sent.rank > 0) {
      ++outline.compressed_parameters;
      outline.compressed_numel += numel;
    }
    outline.sent_numel += sent.total;
    outline.bytes_before += numel * static_cast<int64_t>(parameter.element_size());
    outline.bytes_after +=
        content_bytes(plan_bucket({shape}, options), options, parameter.scalar_type());
  }
  outline.sent_numel += outline.compressed_parameters > 0;  // the bucket's non-finite count
  return outline;
}

}  // namespace powersgd

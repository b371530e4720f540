// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "powersgd/group/stats.h"

namespace powersgd {

// The arguments of a span. A trace has them if the profiler records shapes.
struct SpanArguments {
  int64_t bucket;              // its number in the backward pass
  int64_t bytes;               // of the gradient, or of the payload that is reduced
  int64_t approximation_rank;  // the largest of the bucket's matrices
};

// A span of torch.profiler, from the construction to the destruction: powersgd::project and so on.
// `arguments` returns SpanArguments. While no profiler observes the calling thread, the span does
// nothing and does not call it.
class Span {
 public:
  template <typename Arguments>
  Span(Stage stage, const Arguments& arguments) : function_(at::RecordScope::FUNCTION) {
    if (!function_.isActive()) return;
    const SpanArguments shown = arguments();
    const std::unordered_map<std::string, at::IValue> named = {
        {"bucket", shown.bucket},
        {"bytes", shown.bytes},
        {"matrix_approximation_rank", shown.approximation_rank}};
    function_.before(span_name(stage), &named);
  }

 private:
  at::RecordFunction function_;
};

}  // namespace powersgd

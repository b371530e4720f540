// SPDX-License-Identifier: BSD-3-Clause
#include "model/parameter_layout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

namespace powersgd {
namespace {

struct Layout {
  std::string name;
  at::Tensor parameter;
  std::vector<int64_t> order;  // its dimensions from the outermost in memory to the innermost
  bool has_own_strides;        // DDP lays its gradient out like the parameter, not contiguously
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << layout.name; }

std::vector<Layout> layouts() {
  const auto last = at::MemoryFormat::ChannelsLast;
  return {
      {"vector", at::zeros({5}), {0}, false},
      {"matrix", at::zeros({7, 5}), {0, 1}, false},
      {"one_row", at::zeros({1, 5}), {0, 1}, false},
      {"one_column", at::zeros({5, 1}), {0, 1}, false},
      {"a_dimension_of_one", at::zeros({1, 5, 3}), {1, 0, 2}, false},
      {"transposed", at::zeros({7, 5}).t(), {1, 0}, true},
      {"transposed_square", at::zeros({5, 5}).t(), {1, 0}, true},
      {"permuted", at::zeros({6, 4, 5}).permute({1, 2, 0}), {2, 0, 1}, true},
      {"permuted_cube", at::zeros({4, 4, 4}).permute({2, 0, 1}), {1, 2, 0}, true},
      {"weight", at::zeros({6, 4, 3, 2}), {0, 1, 2, 3}, false},
      {"channels_last", at::zeros({6, 4, 3, 2}).contiguous(last), {0, 2, 3, 1}, true},
      {"channels_last_one_output", at::zeros({1, 4, 3, 2}).contiguous(last), {2, 3, 1, 0}, true},
      {"channels_last_one_input", at::zeros({6, 1, 3, 2}).contiguous(last), {0, 1, 2, 3}, false},
      {"with_gaps", at::zeros({6, 8}).narrow(1, 0, 5), {0, 1}, false},
      {"transposed_with_gaps",
       at::zeros({8, 6}).narrow(0, 0, 5).t().narrow(0, 0, 4),
       {0, 1},
       false},
      {"expanded", at::zeros({6, 1}).expand({6, 5}), {0, 1}, false},
      {"empty", at::zeros({3, 0}), {0, 1}, false},
  };
}

class ParameterLayout : public testing::TestWithParam<Layout> {
 protected:
  const at::Tensor& parameter() const { return GetParam().parameter; }

  // Returns the [rows, cols] that memory holds of a gradient of this parameter.
  at::Tensor in_memory(const at::Tensor& gradient) const {
    const std::vector<int64_t>& order = GetParam().order;
    const int64_t rows = order.size() < 2 ? 1 : parameter().size(order[0]);
    const int64_t cols = rows == 0 ? 0 : parameter().numel() / rows;
    return gradient.permute(order).reshape({rows, cols});
  }

  at::Tensor numbered_gradient() const {
    return at::arange(parameter().numel(), at::kDouble).view(parameter().sizes());
  }
};

INSTANTIATE_TEST_SUITE_P(All, ParameterLayout, testing::ValuesIn(layouts()),
                         [](const auto& test) { return test.param.name; });

TEST_P(ParameterLayout, StridesAreGivenWhereMemoryIsNotContiguous) {
  const ParameterShape shape = memory_layout(parameter());
  EXPECT_EQ(shape.sizes, parameter().sizes().vec());
  const bool own = GetParam().has_own_strides;
  EXPECT_EQ(shape.strides, own ? parameter().strides().vec() : std::vector<int64_t>());
}

TEST_P(ParameterLayout, ATensorGoesToMemoryAndBack) {
  const at::Tensor gradient = numbered_gradient(), matrix = in_memory(gradient);
  EXPECT_TRUE(at::equal(to_memory_order(gradient, parameter()), matrix));
  const at::Tensor back = to_parameter_order(matrix, parameter());
  EXPECT_TRUE(at::equal(back, gradient));
  EXPECT_TRUE(back.is_contiguous());
  // The strides of the matrix make no difference.
  const at::Tensor strided = at::stack({matrix, -matrix}, 2).select(2, 0);
  EXPECT_TRUE(at::equal(to_parameter_order(strided, parameter()), gradient));
}

// The columns of q keep their places beside those of the matrix.
TEST_P(ParameterLayout, ColumnsOfQGoToMemoryAndBack) {
  if (parameter().dim() < 2 || parameter().numel() == 0) return;  // never compressed
  constexpr int64_t kRank = 3;
  // This gradient has a row for each row of q, and so the same columns.
  std::vector<int64_t> sizes = parameter().sizes().vec();
  const size_t rows = static_cast<size_t>(GetParam().order[0]);
  sizes[rows] = kRank;
  const at::Tensor gradient = at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes);
  const at::Tensor in_order = gradient.movedim(GetParam().order[0], 0).reshape({kRank, -1});
  const at::Tensor in_memory = gradient.permute(GetParam().order).reshape({kRank, -1});
  EXPECT_TRUE(at::equal(q_to_parameter_order(in_memory, parameter()), in_order));
  EXPECT_TRUE(at::equal(q_to_memory_order(in_order, parameter()), in_memory));
}

}  // namespace
}  // namespace powersgd

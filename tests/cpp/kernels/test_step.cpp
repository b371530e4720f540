// SPDX-License-Identifier: BSD-3-Clause
//
// Whole steps over several ranks that share this process, against the promises of
// docs/algorithm.md.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "kernels/fixtures/dtypes.h"
#include "kernels/fixtures/kernel_test.h"
#include "kernels/fixtures/reference.h"

namespace powersgd::test {
namespace {

const std::vector<Part> kParts = {Part::raw(5), {24, 40, 3}, Part::raw(9), {30, 17, 3}};

class World {
 public:
  World(const RunnerFactory& factory, int size, const BucketSpec& spec) {
    for (int rank = 0; rank < size; ++rank) {
      runners_.push_back(factory.make());
      ranks.push_back(std::make_unique<DeviceBucket>(*runners_.back(), spec));
      ranks.back()->bucket.output_scale = 1.0 / size;
      ranks.back()->run(Stage::kRandomStart);
    }
  }

  // One step; returns the output of rank 0.
  Values step(const std::vector<Values>& gradients) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks[i]->gradient->set(gradients[i]);
      ranks[i]->run(Stage::kProject);
    }
    all_reduce(&DeviceBucket::p_payload);
    for (auto& rank : ranks) rank->run(Stage::kOrthogonalize);
    for (auto& rank : ranks) rank->run(Stage::kBackProject);
    all_reduce(&DeviceBucket::q_payload);
    for (auto& rank : ranks) {
      rank->run(Stage::kReconstruct);
      ++rank->bucket.step;
    }
    return ranks[0]->gradient->get();
  }

  // The mean over ranks of M - p_hat q_local, in the place of each matrix.
  Values mean_residual() const {
    Values mean(ranks[0]->gradient->get().size());
    for (const auto& rank : ranks) {
      for (const DeviceMatrix& matrix : rank->matrices) {
        const Values zero(static_cast<size_t>(matrix.part.numel()));
        const Checked e = reference_m(matrix.part, zero, matrix.memory->get(), matrix.p_hat->get(),
                                      matrix.q_local->get(), 1);
        for (size_t i = 0; i < zero.size(); ++i) {
          mean[static_cast<size_t>(matrix.gradient_offset) + i] +=
              e.value[i] / static_cast<double>(ranks.size());
        }
      }
    }
    return mean;
  }

  std::vector<std::unique_ptr<DeviceBucket>> ranks;

 private:
  void all_reduce(std::unique_ptr<DeviceArray> DeviceBucket::* payload) {
    Values sum = (*ranks[0].*payload).get()->get();
    for (size_t i = 1; i < ranks.size(); ++i) {
      const Values other = (*ranks[i].*payload).get()->get();
      for (size_t j = 0; j < sum.size(); ++j) sum[j] += other[j];
    }
    for (auto& rank : ranks) (*rank.*payload).get()->set(sum);
  }

  std::vector<std::unique_ptr<StageRunner>> runners_;
};

int64_t numel_of(const std::vector<Part>& parts) {
  int64_t numel = 0;
  for (const Part& part : parts) numel += part.numel();
  return numel;
}

void add_scaled(Values& sum, const Values& values, double scale) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += scale * values[i];
}

Values mean_of(const std::vector<Values>& of_ranks) {
  Values mean(of_ranks[0].size());
  for (const Values& values : of_ranks) {
    add_scaled(mean, values, 1 / static_cast<double>(of_ranks.size()));
  }
  return mean;
}

double distance(Values a, const Values& b) {
  add_scaled(a, b, -1);
  return norm(a);
}

// The outputs and the factors that must agree are the same on all ranks.
void expect_agreement(const World& world) {
  const DeviceBucket& first = *world.ranks[0];
  for (size_t rank = 1; rank < world.ranks.size(); ++rank) {
    const DeviceBucket& other = *world.ranks[rank];
    ASSERT_EQ(other.gradient->bytes(), first.gradient->bytes());
    for (size_t i = 0; i < first.matrices.size(); ++i) {
      ASSERT_EQ(other.matrices[i].p_hat->bytes(), first.matrices[i].p_hat->bytes());
      ASSERT_EQ(other.matrices[i].q_warm->bytes(), first.matrices[i].q_warm->bytes());
    }
  }
}

class Step : public ::testing::TestWithParam<RunnerFactory> {
 protected:
  // Each rank has its own mean, as with data that are not identically distributed.
  std::vector<Values> gradients(int size, uint64_t step, DType dtype = DType::kFloat32) const {
    std::vector<Values> all;
    for (int rank = 0; rank < size; ++rank) {
      Values g = random_values(numel_of(kParts), 1000 * step + static_cast<uint64_t>(rank));
      add_scaled(g, random_values(numel_of(kParts), 77 + static_cast<uint64_t>(rank)), 2);
      all.push_back(decode(dtype, encode(dtype, g)));
    }
    return all;
  }
};

// Nothing is lost, only delayed: the sum of outputs + the mean residual = the sum of mean
// gradients. Each step rounds M once or twice. In float, 20 steps stay far below 1e-5 of the sum.
TEST_P(Step, OutputsAndResidualAddUpToTheGradients) {
  for (const int size : {1, 2, 4}) {
    World world(GetParam(), size, {kParts});
    Values expected(static_cast<size_t>(numel_of(kParts)));
    Values actual = expected;
    for (uint64_t step = 0; step < 20; ++step) {
      const std::vector<Values> g = gradients(size, step);
      for (const Values& values : g) add_scaled(expected, values, 1.0 / size);
      add_scaled(actual, world.step(g), 1);
    }
    add_scaled(actual, world.mean_residual(), 1);
    EXPECT_LE(distance(actual, expected), 1e-5 * norm(expected)) << size << " ranks";
  }
}

// The residual holds what q loses to bfloat16, because M - p_hat q is formed in float. An output
// is as close to the mean gradient as the operands' roundings, 2^-8, allow.
TEST_P(Step, NothingIsLostToBfloat16Products) {
  BucketSpec spec{{{60, 70, 12}, {33, 90, 9}}};
  spec.bfloat16_products = true;
  World world(GetParam(), 2, spec);
  const int64_t numel = numel_of(spec.parts);
  Values expected(static_cast<size_t>(numel)), actual = expected, factors;
  for (const Part& part : spec.parts) {
    const Values exact =
        reference_product({part.rows, part.cols, 5}, random_values(part.rows * 5, 1),
                          random_values(part.cols * 5, 2))
            .value;
    factors.insert(factors.end(), exact.begin(), exact.end());
  }
  for (uint64_t step = 0; step < 10; ++step) {
    add_scaled(expected, factors, 1);
    const Values output = world.step({factors, factors});
    EXPECT_LE(distance(output, factors), std::ldexp(1.0, -7) * norm(factors)) << "step " << step;
    add_scaled(actual, output, 1);
    expect_agreement(world);
  }
  add_scaled(actual, world.mean_residual(), 1);
  EXPECT_LE(distance(actual, expected), 1e-5 * norm(expected));
}

TEST_P(Step, GradientOfLowRankComesBackExactly) {
  World world(GetParam(), 2, {{{40, 50, 3}}});
  const Part factors{40, 50, 2};
  std::vector<Values> g;
  for (uint64_t rank = 0; rank < 2; ++rank) {
    g.push_back(
        reference_product(factors, random_values(80, 1), random_values(100, 2 + rank)).value);
  }
  const Values mean = mean_of(g);
  for (int step = 0; step < 3; ++step) {
    EXPECT_LE(distance(world.step(g), mean), 1e-5 * norm(mean)) << "step " << step;
  }
}

// Very wide matrices are cut into strips, and large gradients take other stores where they are
// aligned to cache lines, or can be after the first few columns.
TEST_P(Step, LargeGradientComesBack) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t misalignment : {0, 3}) {
      const Part part{128, 20000, 2};
      World world(GetParam(), 1, {{part}, dtype, dtype, true, misalignment});
      const Values exact =
          reference_product(part, random_values(part.rows * 2, 1), random_values(part.cols * 2, 2))
              .value;
      const Values g = decode(dtype, encode(dtype, exact));
      // The gradient and the output are of rank 2 up to their rounding to bfloat16.
      EXPECT_LE(distance(world.step({g}), g), 2 * unit_roundoff(dtype) * norm(g) + 1e-5 * norm(g));
    }
  }
}

TEST_P(Step, ConstantGradientConvergesToItself) {
  World world(GetParam(), 2, {{{20, 24, 2}}});
  const std::vector<Values> g = {random_values(480, 1), random_values(480, 2)};
  const Values mean = mean_of(g);
  Values sum(480);
  double residual = 0;
  for (int step = 1; step <= 200; ++step) {
    add_scaled(sum, world.step(g), 1);
    if (step == 100) residual = norm(world.mean_residual());
  }
  EXPECT_LE(distance(scaled(sum, 1.0 / 200), mean), 0.1 * norm(mean));
  EXPECT_LE(norm(world.mean_residual()), 1.5 * residual);
}

TEST_P(Step, RanksAgreeBitForBit) {
  World world(GetParam(), 3, {kParts, DType::kBFloat16, DType::kBFloat16});
  for (uint64_t step = 0; step < 30; ++step) {
    world.step(gradients(3, step, DType::kBFloat16));
    expect_agreement(world);
  }
}

// A gradient that is not finite on one rank costs its step and nothing else.
TEST_P(Step, OneBadStepIsAsIfItHadNotBeen) {
  for (const bool in_raw : {false, true}) {
    World with(GetParam(), 2, {kParts});
    World without(GetParam(), 2, {kParts});
    for (uint64_t step = 0; step < 6; ++step) {
      std::vector<Values> g = gradients(2, step);
      if (step == 2) {
        g[1][in_raw ? 3 : 200] = kNaN;
        for (const double value : with.step(g)) ASSERT_TRUE(std::isnan(value));
        continue;
      }
      const Values expected = without.step(g);
      // (M + G) - G is M up to rounding.
      EXPECT_LE(distance(with.step(g), expected), 1e-5 * norm(expected)) << "step " << step;
    }
  }
}

TEST_P(Step, FirstStepMayBeBad) {
  World world(GetParam(), 2, {kParts});
  std::vector<Values> g = gradients(2, 0);
  g[0].back() = kInfinity;
  world.step(g);
  // In float (0 + G) - G is 0 exactly.
  EXPECT_EQ(norm(world.mean_residual()), 0);
  for (const double value : world.step(gradients(2, 1))) ASSERT_TRUE(std::isfinite(value));
}

// A step without a gradient costs little of the warm start. With singular values 4^-i, the output
// of rank 3 that follows is off by less than twice the best one, 4^-3 of the norm.
TEST_P(Step, ZeroGradientGivesZeroAndSparesQ) {
  const Part part{40, 48, 3};
  BucketSpec spec{{part}};
  spec.error_feedback = false;
  World world(GetParam(), 1, spec);
  Values left = orthonormal_basis(random_values(40 * 8, 1), 40, 8), right(8 * 48);
  const Values basis = orthonormal_basis(random_values(48 * 8, 2), 48, 8);
  for (size_t i = 0; i < right.size(); ++i)
    right[i] = basis[i % 48 * 8 + i / 48] * std::ldexp(1.0, -2 * static_cast<int>(i / 48));
  const Values g = reference_product({40, 48, 8}, left, right).value;
  for (int step = 0; step < 5; ++step) world.step({g});
  EXPECT_EQ(norm(world.step({Values(g.size())})), 0);
  EXPECT_EQ(world.ranks[0]->state().skipped, 0);
  EXPECT_LE(distance(world.step({g}), g), 2 * std::ldexp(1.0, -6) * norm(g));
}

// The sum over ranks has fewer rows than the rank, and later more. The step after that has learned
// them: the output is the mean of a gradient whose rank does not exceed the matrix rank.
TEST_P(Step, RowsOfZerosStayZerosWhileTheRankGrows) {
  for (const bool feedback : {true, false}) {
    for (const int64_t rank : {4, 40}) {
      BucketSpec spec{{{90, 50, rank}}};
      spec.error_feedback = feedback;
      if (!kernels_multiply(spec)) continue;
      World world(GetParam(), 2, spec);
      for (uint64_t step = 0; step < 16; ++step) {
        const int64_t used = step < 6 ? 1 : step < 12 ? 3 : 0;
        std::vector<Values> g;
        for (uint64_t from = 0; from < 2; ++from) {
          g.push_back(random_values(90 * 50, 2 * (step / 6) + from));
          for (int64_t i = 0; i < 90 * 50; ++i) {
            if (i / 50 % 5 != 2 || i / 250 >= used) g.back()[static_cast<size_t>(i)] = 0;
          }
        }
        const Values mean = mean_of(g), output = world.step(g);
        expect_agreement(world);
        EXPECT_LE(distance(output, mean), 1e-5 * norm(mean) + (used == 0 ? 1e-5 : 0)) << step;
        for (size_t i = 0; i < output.size(); ++i) {
          ASSERT_TRUE(output[i] == 0 || (i / 50 % 5 == 2 && i / 250 < 3)) << step << ": " << i;
        }
      }
    }
  }
}

// Each gradient is of rank 1, and its columns those that the last one lacks: P would be 0.
TEST_P(Step, ColumnsThatTakeTurnsAreLearned) {
  World world(GetParam(), 1, {{{30, 24, 1}}});
  Values sum(720), expected = sum;
  for (uint64_t step = 0; step < 12; ++step) {
    Values g(720);
    for (size_t i = 0; i < 30; ++i) g[i * 24 + step / 6] = static_cast<double>(i % 7) - 2;
    add_scaled(expected, g, 1);
    add_scaled(sum, world.step({g}), 1);
  }
  EXPECT_LE(distance(sum, expected), 1e-5 * norm(expected));
}

// When the loss scale doubles, so do gradients exactly, and residuals by project.
TEST_P(Step, LossScaleCarriesOver) {
  for (const bool on_device : {false, true}) {
    World plain(GetParam(), 2, {kParts});
    World world(GetParam(), 2, {kParts});
    for (uint64_t step = 0; step < 6; ++step) {
      std::vector<Values> g = gradients(2, step);
      const Values expected = plain.step(g);
      const double scale = step < 2 ? 1 : step < 4 ? 2 : 0.25;
      for (Values& values : g) values = scaled(values, scale);
      for (auto& rank : world.ranks) {
        rank->bucket.units = on_device ? 1 : scale;
        if (on_device) rank->put_loss_scale(scale);
      }
      EXPECT_EQ(scaled(world.step(g), 1 / scale), expected) << "step " << step;
    }
  }
}

// A replayed CUDA graph repeats the bucket, and only the device knows the step and the loss scale.
TEST_P(Step, AReplayedStepIsTheNextOne) {
  // A rank above the gradient's leaves rows of Q zero, which are drawn anew by the step.
  const BucketSpec spec{{{24, 40, 3}}};
  World eager(GetParam(), 1, spec), replayed(GetParam(), 1, spec);
  DeviceBucket& bucket = *replayed.ranks[0];
  for (uint64_t step = 0; step < 6; ++step) {
    const double scale = step < 3 ? 1 : 4;
    const Values g = scaled(
        reference_product({24, 40, 1}, random_values(24, step), random_values(40, step)).value,
        scale);
    eager.ranks[0]->bucket.units = scale;
    bucket.put_loss_scale(scale);
    bucket.bucket.step = step == 0 ? 0 : kernels::kNextStep;
    EXPECT_EQ(replayed.step({g}), eager.step({g})) << "step " << step;
    EXPECT_EQ(bucket.state().step, step);
    EXPECT_EQ(bucket.matrices[0].q_warm->bytes(), eager.ranks[0]->matrices[0].q_warm->bytes());
  }
}

INSTANTIATE_TEST_SUITE_P(All, Step, ::testing::ValuesIn(stage_runners()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace powersgd::test

// SPDX-License-Identifier: BSD-3-Clause
#include "group/compressed_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/errors.h"

namespace powersgd {
namespace {

using Events = std::vector<std::string>;

// The events of a step in their order. The event named `fails` throws.
struct Log {
  void add(const std::string& event) {
    events.push_back(event);
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() == start) continue;  // every event takes some time
    if (event == fails) throw std::runtime_error("injected into " + event);
  }

  Events events;
  std::string fails;
};

class RecordingPayload : public Payload {
 public:
  RecordingPayload(Log& log, std::string name) : name(std::move(name)), log_(log) {}

  Schedule schedule() const override { return chosen; }
  HostSum* host() override { return of_host.levels ? &of_host : nullptr; }
  at::Tensor& elements() override { return numbers; }
  at::Tensor& sent() override { return all_sent; }
  at::Tensor& received() override { return all_received; }
  at::Tensor& reduced() override { return all_reduced; }
  at::Tensor& gathered() override { return all_gathered; }
  void quantize() override { log_.add("quantize " + name); }
  void requantize() override { log_.add("requantize " + name); }
  void dequantize() override { log_.add("dequantize " + name); }

  const std::string name;
  Schedule chosen = Schedule::kAllreduce;
  at::Tensor numbers = at::zeros({1});
  at::Tensor all_sent = at::zeros({2}), all_received = at::zeros({3}), all_reduced = at::zeros({4}),
             all_gathered = at::zeros({5});
  HostSum of_host;  // without levels: none

 private:
  Log& log_;
};

class RecordingCompressor : public BucketCompressor {
 public:
  explicit RecordingCompressor(Log& log) : p(log, "P"), q(log, "Q"), log_(log) {}

  void prepare() override {}
  Payload& project(const at::Tensor& gradient, const StepInfo& step) override {
    log_.add("project");
    seen_gradient = gradient;
    seen_step = step;
    return p;
  }
  void orthogonalize() override { log_.add("orthogonalize"); }
  Payload& back_project() override {
    log_.add("back_project");
    return q;
  }
  void reconstruct() override { log_.add("reconstruct"); }
  void rollback() override { log_.add("rollback"); }
  int64_t payload_bytes() const override { return 30; }
  bool in_two_levels() const override { return p.of_host.levels || q.of_host.levels; }
  int64_t gradient_bytes() const override { return 700; }
  int64_t approximation_rank() const override { return 4; }
  std::vector<ParameterStatePtr> states() const override { return all_states; }

  RecordingPayload p, q;
  at::Tensor seen_gradient;
  StepInfo seen_step;
  std::vector<ParameterStatePtr> all_states{std::make_shared<ParameterState>(1),
                                            std::make_shared<ParameterState>(2)};

 private:
  Log& log_;
};

class RecordingChannel : public Channel {
 public:
  RecordingChannel(Log& log, RecordingCompressor& compressor)
      : log_(log), payloads_{&compressor.p, &compressor.q} {}

  std::function<std::shared_ptr<void>()> observe;

  void allreduce(at::Tensor& payload) override {
    const auto observed = observe();
    log_.add("sum " + describe(payload));
  }
  void allgather(at::Tensor& output, at::Tensor& input, const Members* members) override {
    const auto observed = observe();
    log_.add("gather " + describe(input) + " as " + describe(output) + among(members));
  }
  void alltoall(at::Tensor& output, at::Tensor& input, const Members* members) override {
    const auto observed = observe();
    log_.add("exchange " + describe(input) + " as " + describe(output) + among(members));
  }

 private:
  static std::string among(const Members* members) {
    return members ? " among " + std::to_string(members->count()) : "";
  }

  std::string describe(const at::Tensor& tensor) const {
    for (const RecordingPayload* payload : payloads_) {
      if (tensor.is_same(payload->numbers)) return payload->name;
      if (tensor.is_same(payload->all_sent)) return payload->name + " sent";
      if (tensor.is_same(payload->all_received)) return payload->name + " received";
      if (tensor.is_same(payload->all_reduced)) return payload->name + " reduced";
      if (tensor.is_same(payload->all_gathered)) return payload->name + " gathered";
      if (tensor.is_same(payload->of_host.slices)) return payload->name + " slices";
      if (tensor.is_same(payload->of_host.terms)) return payload->name + " terms";
      if (tensor.is_same(payload->of_host.slice)) return payload->name + " slice";
    }
    return "another tensor";
  }

  Log& log_;
  const std::array<const RecordingPayload*, 2> payloads_;
};

class CompressedStep : public testing::Test {
 protected:
  // Runs the job as an engine does, and returns its events.
  Events run(const StageProbe& probe = {}) {
    log_.events.clear();
    compressor_ = std::make_shared<RecordingCompressor>(log_);
    compressor_->p.chosen = schedule_of_p_;
    compressor_->q.chosen = schedule_of_q_;
    if (two_levels_of_p_) {
      at::Tensor slices = at::zeros({8});
      compressor_->p.of_host = {levels_of({0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}, 0), slices,
                                at::zeros({4, 2}), slices.narrow(0, 0, 2)};
    }
    RecordingChannel channel(log_, *compressor_);
    const Job job = compressed_step(compressor_, gradient_, {0.5, 8, 3, 2}, stats_,
                                    std::make_shared<const StageProbe>(probe));
    channel.observe = job.observe;
    error_ = test::error_of([&] {
      for (const auto& part : job.parts) part(channel);
    });
    if (error_ != "no error") job.undo();
    changes_ = job.changes;
    return log_.events;
  }

  Log log_;
  const StageProbe probe_ = [this](const char* reached, int64_t bucket) {
    log_.add("> " + std::string(reached) + " " + std::to_string(bucket));
  };
  Schedule schedule_of_p_ = Schedule::kAllreduce, schedule_of_q_ = Schedule::kAllreduce;
  bool two_levels_of_p_ = false;
  const at::Tensor gradient_ = at::zeros({3});
  const std::shared_ptr<Stats> stats_ = std::make_shared<Stats>();
  std::shared_ptr<RecordingCompressor> compressor_;
  std::vector<const void*> changes_;
  std::string error_;
};

TEST_F(CompressedStep, SumsBothPayloads) {
  EXPECT_EQ(run(),
            (Events{"project", "sum P", "orthogonalize", "back_project", "sum Q", "reconstruct"}));
  EXPECT_EQ(error_, "no error");
}

TEST_F(CompressedStep, ExchangesPacketsByTheirSchedules) {
  schedule_of_p_ = Schedule::kTwoShot;
  schedule_of_q_ = Schedule::kOneShot;
  EXPECT_EQ(run(), (Events{"project", "quantize P", "exchange P sent as P received", "requantize P",
                           "gather P reduced as P gathered", "dequantize P", "orthogonalize",
                           "back_project", "quantize Q", "gather Q sent as Q received",
                           "dequantize Q", "reconstruct"}));
  EXPECT_EQ(error_, "no error");
}

// Four ranks on each of three hosts.
TEST_F(CompressedStep, SumsWithinAHostBeforeAndAfterTheOthers) {
  two_levels_of_p_ = true;
  schedule_of_p_ = Schedule::kTwoShot;
  schedule_of_q_ = Schedule::kOneShot;
  EXPECT_EQ(run(),
            (Events{"project", "exchange P slices as P terms among 4", "quantize P",
                    "exchange P sent as P received among 3", "requantize P",
                    "gather P reduced as P gathered among 3", "dequantize P",
                    "gather P slice as P slices among 4", "orthogonalize", "back_project",
                    "quantize Q", "gather Q sent as Q received", "dequantize Q", "reconstruct"}));
  EXPECT_EQ(error_, "no error");
}

TEST_F(CompressedStep, PassesItsGradientAndInfoOn) {
  run();
  EXPECT_TRUE(compressor_->seen_gradient.is_same(gradient_));
  EXPECT_EQ(compressor_->seen_step.output_scale, 0.5);
  EXPECT_EQ(compressor_->seen_step.units, 8);
  EXPECT_EQ(compressor_->seen_step.step, 3u);
}

TEST_F(CompressedStep, TheEngineLearnsWhichStatesItChanges) {
  run();
  const auto& states = compressor_->all_states;
  EXPECT_EQ(changes_, (std::vector<const void*>{states[0].get(), states[1].get()}));
}

TEST_F(CompressedStep, CountsItsBytesAndTimesItsStages) {
  run();
  const StatsSnapshot stats = stats_->snapshot();
  EXPECT_EQ(stats.compressed_calls, 1);
  EXPECT_EQ(stats.compressed_bytes_before, 700);
  EXPECT_EQ(stats.compressed_bytes_after, 30);
  for (const double seconds : stats.seconds) EXPECT_GT(seconds, 0);
}

TEST_F(CompressedStep, TheProbeSeesEachStageBeforeItRuns) {
  EXPECT_EQ(run(probe_), (Events{"> ready 2",          "> project 2",      "project",
                                 "> reduce_p 2",       "> collective 2",   "sum P",
                                 "> collective_end 2", "> received 2",     "> orthogonalize 2",
                                 "orthogonalize",      "> back_project 2", "back_project",
                                 "> reduce_q 2",       "> collective 2",   "sum Q",
                                 "> collective_end 2", "> received 2",     "> reconstruct 2",
                                 "reconstruct",        "> end 2"}));
}

TEST_F(CompressedStep, WhateverFailsIsRolledBackOnceAndThrown) {
  schedule_of_p_ = Schedule::kTwoShot;
  const Events all = run(probe_);
  for (size_t i = 1; i < all.size(); ++i) {  // the first comes before the job
    if (all[i] == "> collective_end 2") continue;
    log_.fails = all[i];
    const auto failed = std::find(all.begin(), all.end(), all[i]);
    Events expected(all.begin(), failed + 1);
    if (*(failed - 1) == "> collective 2") expected.push_back("> collective_end 2");
    expected.push_back("rollback");
    EXPECT_EQ(run(probe_), expected);
    EXPECT_EQ(error_, "injected into " + all[i]);
  }
}

TEST_F(CompressedStep, WithoutAPayloadNoBytesAreCounted) {
  log_.fails = "project";
  run();
  EXPECT_EQ(stats_->snapshot().compressed_calls, 0);
  EXPECT_EQ(stats_->snapshot().bytes_before, 0);
}

}  // namespace
}  // namespace powersgd

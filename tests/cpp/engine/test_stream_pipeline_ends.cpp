// SPDX-License-Identifier: BSD-3-Clause
//
// The ends of a stream engine's pipeline: waits before its flush, exceptions, shutdown and abort.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/stream_pipeline.h"
#include "engine/work.h"
#include "support/errors.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::AffineJob;
using test::Group;
using test::in_many_orders;
using test::Names;
using test::Pass;
using test::StreamBackend;

TEST(StreamPipelineEnds, WhoeverAsksBeforeTheFlushGetsTheResult) {
  using Use = std::function<void(c10d::Work&)>;
  const std::vector<Use> uses = {[](c10d::Work& work) { EXPECT_TRUE(work.wait()); },
                                 [](c10d::Work& work) { work.synchronize(); },
                                 [](c10d::Work& work) { work.getFuture()->wait(); },
                                 [](c10d::Work& work) {
                                   EXPECT_FALSE(work.isCompleted());
                                   EXPECT_TRUE(work.isSuccess());
                                   work.wait();
                                 },
                                 [](c10d::Work& work) {
                                   EXPECT_EQ(work.result().size(), 1U);
                                   work.wait();
                                 }};
  for (const Use& use : uses) {
    in_many_orders([&](Group& group) {
      AffineJob job(fake::device(0));
      job.fill(1);
      const auto work = job.submit(group.engine, /*more_follow=*/true);
      use(*work);
      job.expect(6);
      EXPECT_TRUE(work->isCompleted());
    });
  }
}

TEST(StreamPipelineEnds, AFutureThatWasTakenBeforeTheFlushIsCompletedByIt) {
  in_many_orders([](Group& group) {
    AffineJob job(fake::device(0)), next(fake::device(0));
    job.fill(1);
    const auto work = job.submit(group.engine, /*more_follow=*/true);
    const auto future = static_cast<StreamWork&>(*work).future_without_flush();
    EXPECT_FALSE(future->completed());
    bool called = false;
    // The callback may submit a job itself.
    future->addCallback([&](c10::ivalue::Future&) {
      called = true;
      next.submit(group.engine);
    });
    group.engine.flush();
    EXPECT_TRUE(called);
    ASSERT_TRUE(future->completed());
    future->wait();
    job.expect(6);
  });
}

// A backward pass that an exception ends is followed by one that does not begin where it ended.
TEST(StreamPipelineEnds, APassThatDoesNotReachItsEndIsCompletedByTheNext) {
  in_many_orders([](Group& group) {
    Pass dead(4), next(3);
    dead.submit(group.engine, 2);
    next.submit(group.engine);
    next.expect_results();
    dead.expect_results();
    EXPECT_EQ(group.backend->ran, (Names{"1", "2", "1", "1", "2", "2", "1", "3", "2",
                                         "3"}));  // the dead pass's: 1 2 1 2
  });
}

TEST(StreamPipelineEnds, TheEndOfTheEngineCompletesWhatWasPutOff) {
  using End = std::function<void(std::optional<StreamEngine>&)>;
  const std::vector<End> ends = {[](auto& engine) { engine->shutdown(); },
                                 [](auto& engine) { engine.reset(); }};
  for (const End& end : ends) {
    fake::reset(0, fake::Host::kMayNotWait);
    std::optional<StreamEngine> engine(std::in_place, 0, c10::make_intrusive<StreamBackend>());
    AffineJob job(fake::device(0));
    job.fill(1);
    const auto work = job.submit(*engine, /*more_follow=*/true);
    end(engine);
    const auto future = static_cast<StreamWork&>(*work).future_without_flush();
    ASSERT_TRUE(future && future->completed());
    work->wait();
    job.expect(6);
  }
}

TEST(StreamPipelineEnds, AnAbortFailsWhatWasPutOff) {
  fake::reset(0, fake::Host::kMayNotWait);
  Group group;
  Pass jobs(3);
  jobs.submit(group.engine, 2);
  group.engine.abort();
  const auto& works = jobs.works();
  EXPECT_TRUE(static_cast<StreamWork&>(*works[1]).future_without_flush()->hasError());
  EXPECT_TRUE(test::contains(test::error_of([&] { works[1]->wait(); }), "shut down or aborted"));
  works[0]->wait();
  fake::run();
  EXPECT_EQ(group.backend->ran, (Names{"1", "2", "1"})) << "a collective came after the abort";
}

TEST(StreamPipelineEnds, AFailedFirstPartLeavesTheJobBeforeItAlone) {
  in_many_orders([](Group& group) {
    AffineJob good(fake::device(0));
    good.fill(1);
    const auto before = good.submit(group.engine, /*more_follow=*/true);
    Job job = test::job_of([](Channel&) { throw std::runtime_error("bad"); },
                           [](Channel&) { FAIL() << "ran after a failure"; });
    job.more_follow = true;
    const auto bad = group.submit(std::move(job));
    EXPECT_EQ(test::error_of([&] { bad->wait(); }), "bad");
    EXPECT_FALSE(bad->isSuccess());
    before->wait();
    good.expect(6);
  });
}

// A device that has failed throws from everything that it is asked for.
TEST(StreamPipelineEnds, IfUndoThrowsTooTheWorkHasTheFirstErrorAndTheNextJobRuns) {
  for (const size_t failing : {0, 1}) {
    in_many_orders([&](Group& group) {
      const auto fail = [](Channel&) { throw std::runtime_error("bad"); };
      Job job = failing == 0 ? test::job_of(fail) : test::job_of([](Channel&) {}, fail);
      job.undo = [] { throw std::runtime_error("worse"); };
      job.more_follow = true;
      const auto bad = group.submit(std::move(job));
      AffineJob good(fake::device(0));
      good.fill(1);
      good.submit(group.engine)->wait();
      good.expect(6);
      EXPECT_EQ(test::error_of([&] { bad->wait(); }), "bad");
      EXPECT_TRUE(bad->isCompleted());
    });
  }
}

TEST(StreamPipelineEnds, AFailedSecondPartIsItsOwnWorksAndTheNextJobRuns) {
  in_many_orders([](Group& group) {
    Job job = test::job_of([](Channel&) { throw std::runtime_error("bad"); });
    job.more_follow = true;
    const auto bad = group.submit(std::move(job));
    AffineJob good(fake::device(0));
    good.fill(1);
    const auto after = good.submit(group.engine);
    EXPECT_TRUE(after->wait());
    const auto seen = good.read();
    EXPECT_EQ(test::error_of([&] { bad->wait(); }), "bad");
    EXPECT_TRUE(static_cast<StreamWork&>(*bad).future_without_flush()->hasError());
    fake::run();
    EXPECT_EQ(*seen, 6);
  });
}

}  // namespace
}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
//
// The pipeline of a stream engine: jobs of one backward pass whose second parts are put off.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/stream_pipeline.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using test::AffineJob;
using test::Group;
using test::in_many_orders;
using test::is_before;
using test::Names;
using test::noted;
using test::Pass;

TEST(StreamPipeline, ResultsAreTheSameInAnyOrder) {
  in_many_orders([](Group& group) {
    fake::use_new_stream(fake::device(0));
    for (int pass = 0; pass < 3; ++pass) {
      Pass jobs(4);
      jobs.submit(group.engine);
      jobs.expect_results();
    }
  });
}

TEST(StreamPipeline, AModuleMayBeSpreadOverDevices) {
  in_many_orders([](Group& group) {
    for (int pass = 0; pass < 2; ++pass) {
      Pass jobs(5, {0, 1, 1});
      jobs.submit(group.engine);
      jobs.expect_results();
    }
  });
}

// The events between collectives do so, even if the communicator does not order its streams.
TEST(StreamPipeline, CollectivesComeInAFixedOrder) {
  in_many_orders([](Group& group) {
    group.backend->orders_streams = false;
    for (int pass = 0; pass < 2; ++pass) {
      Pass jobs(4);
      jobs.submit(group.engine);
      jobs.expect_results();
      EXPECT_EQ(group.backend->ran, (Names{"1", "2", "1", "3", "2", "4", "3", "4"}));
      group.backend->ran.clear();
    }
  });
}

// Returns how often, of all orders, the second bucket is projected before the first one is
// orthogonalized.
unsigned count_overlaps(bool more_follow) {
  unsigned overlaps = 0;
  in_many_orders([&](Group& group) {
    Names ran;
    group.submit(noted("0", ran, more_follow));
    group.submit(noted("1", ran, more_follow));
    group.engine.flush();
    fake::run();
    ASSERT_EQ(ran.size(), 4U);
    overlaps += is_before(ran, "project 1", "orthogonalize 0");
    EXPECT_TRUE(is_before(ran, "project 0", "orthogonalize 0"));
    EXPECT_TRUE(is_before(ran, "project 1", "orthogonalize 1"));
    EXPECT_TRUE(is_before(ran, "project 0", "project 1"));
    EXPECT_TRUE(is_before(ran, "orthogonalize 0", "orthogonalize 1"));
  });
  return overlaps;
}

TEST(StreamPipeline, TheNextFirstPartRunsBesideASecondPart) {
  const unsigned overlaps = count_overlaps(/*more_follow=*/true);
  EXPECT_GT(overlaps, test::kOrders / 10);
  EXPECT_LT(overlaps, test::kOrders);
}

TEST(StreamPipeline, JobsWithoutThePromiseAreSerial) {
  EXPECT_EQ(count_overlaps(/*more_follow=*/false), 0U);
}

TEST(StreamPipeline, TheNextPassBeginsAfterAllSecondParts) {
  in_many_orders([](Group& group) {
    Names ran;
    group.submit(noted("0", ran));
    group.submit(noted("1", ran, /*more_follow=*/false));
    group.submit(noted("2", ran));
    group.engine.flush();
    fake::run();
    EXPECT_TRUE(is_before(ran, "orthogonalize 1", "project 2"));
  });
}

TEST(StreamPipeline, JobsThatShareAnObjectDoNotOverlap) {
  in_many_orders([](Group& group) {
    group.backend->orders_streams = false;
    AffineJob shared(fake::device(0), 1), other(fake::device(0), 2);
    shared.fill(1);
    other.fill(1);
    for (int i = 0; i < 2; ++i) shared.submit(group.engine, /*more_follow=*/true);
    other.submit(group.engine, /*more_follow=*/true);
    shared.submit(group.engine, /*more_follow=*/true)->wait();  // shared with an ended job as well
    shared.expect(4 * (4 * 6 + 2) + 2);
    EXPECT_EQ(group.backend->ran, (Names{"1", "1", "1", "2", "1", "2", "1", "1"}));
  });
}

TEST(StreamPipeline, AJobThatIsAloneRunsAfterWhatWasPutOff) {
  in_many_orders([](Group& group) {
    Names ran;
    group.submit(noted("0", ran));
    group.submit(noted("1", ran));
    Job alone = job_alone(
        [&](Channel&) { fake::enqueue(fake::device(0), [&ran] { ran.emplace_back("alone"); }); });
    group.submit(std::move(alone));
    group.submit(noted("2", ran));
    group.engine.flush();
    fake::run();
    EXPECT_TRUE(is_before(ran, "orthogonalize 1", "alone"));
    EXPECT_TRUE(is_before(ran, "alone", "project 2"));
  });
}

// A single rank may submit it.
TEST(StreamPipeline, ALocalJobLeavesTheOrderOfCollectives) {
  in_many_orders([](Group& group) {
    Pass jobs(3);
    jobs.submit(group.engine, 2);
    Job local = test::job_of([](Channel&) {});
    local.local = true;
    group.submit(std::move(local))->wait();
    fake::run();
    EXPECT_EQ(group.backend->ran, (Names{"1", "2", "1"}));
    group.engine.flush();
    jobs.expect_results();
  });
}

// The streams that the allocator is told to use a job's memory.
std::vector<c10::Stream> users_of_memory(bool more_follow) {
  fake::reset(0, fake::Host::kMayNotWait);
  Group group;
  AffineJob job(fake::device(1));
  job.submit(group.engine, more_follow);
  group.engine.flush();
  std::vector<c10::Stream> streams;
  for (const auto& [memory, stream] : fake::recorded_uses()) {
    if (memory == job.tensor().data_ptr()) streams.push_back(stream);
  }
  return streams;
}

TEST(StreamPipeline, TheAllocatorKnowsTheStreamsThatUseTheMemory) {
  const auto alone = users_of_memory(/*more_follow=*/false);
  ASSERT_EQ(alone.size(), 1U);
  EXPECT_NE(alone[0].id(), 0);
  EXPECT_EQ(alone[0].device(), fake::device(1));
  const auto both = users_of_memory(/*more_follow=*/true);
  ASSERT_EQ(both.size(), 2U);
  EXPECT_NE(both[0], both[1]);
}

// Also if the second part is put off.
TEST(StreamPipeline, MemoryThatIsReleasedStaysUntilTheJobHasReadIt) {
  fake::add_operators();
  const c10::Device device = fake::device(0);
  for (const bool more_follow : {false, true}) {
    in_many_orders([&](Group& group) {
      std::vector<float> copied(1000, -1.0F);
      {
        const at::Tensor tensor = at::ones({1000}, device);
        Job job = test::job_of([&, data = tensor.data_ptr()](Channel&) {
          fake::enqueue(device, [&, data] {
            std::copy_n(static_cast<const float*>(data), copied.size(), copied.data());
          });
        });
        job.more_follow = more_follow;
        group.engine.submit({tensor}, std::move(job), device, c10d::kUnsetTimeout);
      }
      AffineJob next(device);
      next.submit(group.engine);
      fake::run();
      EXPECT_EQ(copied, std::vector<float>(1000, 1.0F));
    });
  }
}

}  // namespace
}  // namespace powersgd

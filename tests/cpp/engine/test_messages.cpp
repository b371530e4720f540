// SPDX-License-Identifier: BSD-3-Clause
//
// Thread engines whose jobs exchange messages. The test holds the messages, and so sees how many
// are on their way at once.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/jobs.h"
#include "engine/thread_engine.h"
#include "ranks/connected.h"
#include "ranks/thread_backend.h"
#include "support/errors.h"

namespace powersgd {
namespace {

using std::chrono::milliseconds;
using test::contains;
using test::error_of;
using test::kNeverReached;
using test::WorkPtr;

enum class Kind { kOneShot, kTwoShot };

// A bucket of one rank, which sums two payloads one after the other: the own number, and the sum of
// all ranks' numbers.
class Bucket {
 public:
  Bucket(int rank, int size, Kind kind)
      : rank_(rank),
        kind_(kind),
        mine_(at::empty({size})),
        received_{at::empty({size}), at::empty({size})},
        reduced_(at::empty({1})),
        gathered_{at::empty({size}), at::empty({size})} {}

  Job job(double number) {
    Job job;
    job.parts = {[this, number](Channel& channel) { begin(channel, number, 0); },
                 [this](Channel& channel) { reach_owners(channel, 0); },
                 [this](Channel& channel) { begin(channel, sum(0), 1); },
                 [this](Channel& channel) { reach_owners(channel, 1); },
                 [this](Channel&) { result = sum(1); }};
    job.undo = [this] { ++undone; };
    job.changes = {this};
    job.exchange = exchange;
    return job;
  }

  double result = 0;
  int undone = 0;
  std::shared_ptr<const void> exchange = std::make_shared<int>();

 private:
  void begin(Channel& channel, double number, size_t payload) {
    mine_.fill_(number);
    if (kind_ == Kind::kOneShot) {
      at::Tensor one = mine_.narrow(0, 0, 1);
      channel.allgather(received_[payload], one, nullptr);
    } else {
      channel.alltoall(received_[payload], mine_, nullptr);
    }
  }
  void reach_owners(Channel& channel, size_t payload) {
    if (kind_ == Kind::kOneShot) return;
    reduced_.copy_(received_[payload].sum());
    channel.allgather(gathered_[payload], reduced_, nullptr);
  }
  double sum(size_t payload) {
    if (kind_ == Kind::kOneShot) return received_[payload].sum().item<double>();
    EXPECT_TRUE(gathered_[payload].eq(gathered_[payload][0]).all().item<bool>());
    return gathered_[payload][rank_].item<double>();
  }

  const int rank_;
  const Kind kind_;
  at::Tensor mine_;
  std::vector<at::Tensor> received_;
  at::Tensor reduced_;
  std::vector<at::Tensor> gathered_;
};

// The engines of all ranks.
class Engines {
 public:
  explicit Engines(int size, Grace grace = {kNeverReached, std::chrono::hours(1)})
      : size(size), backends(test::make_thread_backends(size)) {
    for (int rank = 0; rank < size; ++rank) {
      engines.push_back(std::make_unique<ThreadEngine>(
          rank, std::make_shared<Connection>(test::connected(backends[rank])), grace));
    }
  }
  ~Engines() {  // all at once, as ranks do
    std::vector<std::thread> ends;
    for (const auto& engine : engines) ends.emplace_back([&] { engine->shutdown(); });
    for (std::thread& end : ends) end.join();
  }

  // Adds a bucket to each rank.
  void add_bucket(Kind kind) {
    buckets.emplace_back();
    for (int rank = 0; rank < size; ++rank) {
      buckets.back().push_back(std::make_unique<Bucket>(rank, size, kind));
    }
  }
  // Submits a job of each rank.
  std::vector<WorkPtr> submit(size_t bucket) {
    std::vector<WorkPtr> works;
    for (int rank = 0; rank < size; ++rank) {
      works.push_back(test::submit(*engines[rank], buckets[bucket][rank]->job(rank + 1)));
    }
    return works;
  }
  void expect_result(size_t bucket) {
    const double sum = size * (size + 1) / 2;
    for (const auto& of_rank : buckets[bucket]) EXPECT_EQ(of_rank->result, size * sum);
  }

  test::ThreadGroup& network() { return backends[0]->group(); }
  // The messages of one exchange.
  size_t messages() const { return static_cast<size_t>(size * (size - 1)); }

  const int size;
  const test::ThreadBackends backends;
  std::vector<std::unique_ptr<ThreadEngine>> engines;
  std::vector<std::vector<std::unique_ptr<Bucket>>> buckets;
};

void wait_for(const std::vector<WorkPtr>& works) {
  for (const WorkPtr& work : works) work->wait();
}

// Each round of messages is delivered once all jobs have sent theirs. So nothing waits for more
// rounds than its own payloads need, whatever the number of jobs and ranks.
TEST(Messages, OfAllJobsAreOnTheirWayAtOnce) {
  constexpr size_t kJobs = 6;
  for (const int size : {2, 3, 8}) {
    for (const Kind kind : {Kind::kOneShot, Kind::kTwoShot}) {
      SCOPED_TRACE(size);
      Engines ranks(size);
      ranks.network().hold_messages();
      for (size_t job = 0; job < kJobs; ++job) ranks.add_bucket(kind);
      for (int pass = 0; pass < 3; ++pass) {  // later ones find their receives posted
        std::vector<WorkPtr> works;
        for (size_t job = 0; job < kJobs; ++job) {
          for (const WorkPtr& work : ranks.submit(job)) works.push_back(work);
        }
        for (int round = 0; round < (kind == Kind::kOneShot ? 2 : 4); ++round) {
          ranks.network().deliver(kJobs * ranks.messages(), kNeverReached);
        }
        wait_for(works);
        for (size_t job = 0; job < kJobs; ++job) ranks.expect_result(job);
      }
    }
  }
}

// True if the second job sends while the first is on its way.
bool sends_beside(const std::function<void(Job&, Job&)>& change) {
  Engines ranks(2);
  ranks.network().hold_messages();
  for (int i = 0; i < 2; ++i) ranks.add_bucket(Kind::kOneShot);
  std::vector<WorkPtr> works;
  for (int rank = 0; rank < 2; ++rank) {
    Job one = ranks.buckets[0][rank]->job(1), other = ranks.buckets[1][rank]->job(1);
    change(one, other);
    works.push_back(test::submit(*ranks.engines[rank], std::move(one)));
    works.push_back(test::submit(*ranks.engines[rank], std::move(other)));
  }
  // A job that must not begin is given the time to.
  const std::string error = error_of([&] { ranks.network().expect_held(4, milliseconds(50)); });
  const bool beside = error == "no error";
  for (int round = 0; round < (beside ? 2 : 4); ++round) {
    ranks.network().deliver(beside ? 4 : 2, kNeverReached);
  }
  wait_for(works);
  return beside;
}

TEST(Messages, OfJobsThatShareAStateFollowEachOther) {
  const int shared = 0;
  EXPECT_FALSE(sends_beside([&](Job& one, Job& other) {
    one.changes.push_back(&shared);
    other.changes.push_back(&shared);
  }));
}

TEST(Messages, OfAJobAloneAreAlone) {
  EXPECT_FALSE(sends_beside([](Job& one, Job&) { one.alone = true; }));
  EXPECT_FALSE(sends_beside([](Job&, Job& other) { other.alone = true; }));
}

// From the second job of an exchange on. One that comes once leaves no receive behind.
TEST(Messages, AreReceivedByReceivesOfTheJobBefore) {
  Engines ranks(3);
  ranks.add_bucket(Kind::kTwoShot);
  constexpr int kOfAJob = 4 * 2;
  for (const int posted : {1, 3, 4}) {  // jobs' receives, once so many jobs have ended
    wait_for(ranks.submit(0));
    test::submit(*ranks.engines[0], job_alone([](Channel&) {}))->wait();  // after the posting
    const auto calls = ranks.backends[0]->calls();
    const auto receives = std::count_if(calls.begin(), calls.end(),
                                        [](const auto& call) { return call.operation == "recv"; });
    EXPECT_EQ(receives, posted * kOfAJob);
    ranks.expect_result(0);
  }
}

TEST(Messages, AnAbortEndsTheWaitForThemAndUndoesTheJob) {
  Engines ranks(2);
  ranks.network().hold_messages();
  for (int i = 0; i < 2; ++i) ranks.add_bucket(Kind::kOneShot);
  const std::vector<WorkPtr> first = ranks.submit(0), second = ranks.submit(1);
  ranks.network().expect_held(4, kNeverReached);
  const auto began = std::chrono::steady_clock::now();
  for (const auto& engine : ranks.engines) engine->abort();  // would wait for an hour
  EXPECT_LT(std::chrono::steady_clock::now() - began, kNeverReached);
  for (const auto& works : {first, second}) {
    for (const WorkPtr& work : works) {
      EXPECT_TRUE(contains(error_of([&] { work->wait(); }), "shut down or aborted"));
    }
  }
  for (const auto& bucket : ranks.buckets) {
    for (const auto& of_rank : bucket) EXPECT_EQ(of_rank->undone, 1);
  }
}

TEST(Messages, ThatDoNotArriveFailTheJobAndUndoIt) {
  Engines ranks(2);
  ranks.network().hold_messages();
  ranks.add_bucket(Kind::kOneShot);
  const std::vector<WorkPtr> works = ranks.submit(0);
  ranks.network().expect_held(2, kNeverReached);
  ranks.backends[1]->kill("unplugged");
  for (const WorkPtr& work : works) {
    EXPECT_TRUE(contains(error_of([&] { work->wait(); }), "unplugged"));
  }
  for (const auto& of_rank : ranks.buckets[0]) EXPECT_EQ(of_rank->undone, 1);
}

// A job that fails on all ranks alike, before its second exchange, leaves the next one its
// messages.
TEST(Messages, OfTheNextJobAreNotThoseOfOneThatFailed) {
  Engines ranks(2);
  ranks.add_bucket(Kind::kOneShot);
  wait_for(ranks.submit(0));
  std::vector<WorkPtr> works;
  for (int rank = 0; rank < 2; ++rank) {
    Job job = ranks.buckets[0][rank]->job(100);
    job.parts[2] = [](Channel&) { throw std::runtime_error("bad"); };
    works.push_back(test::submit(*ranks.engines[rank], std::move(job)));
  }
  for (const WorkPtr& work : works) EXPECT_EQ(error_of([&] { work->wait(); }), "bad");
  wait_for(ranks.submit(0));
  ranks.expect_result(0);
}

}  // namespace
}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
//
// The in-process backend that other tests use.
#include "ranks/thread_ranks.h"

#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/errors.h"

namespace powersgd::test {
namespace {

using Backend = c10::intrusive_ptr<ThreadBackend>;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

at::Tensor sample(int rank, int64_t numel) {
  return at::sin(at::arange(numel, at::kFloat) * (rank + 1));
}

TEST(ThreadBackend, AllreduceAddsInRankOrder) {
  const at::Tensor expected = sample(0, 1000) + sample(1, 1000) + sample(2, 1000);
  run_ranks(3, [&](int rank, const Backend& backend) {
    for (const bool average : {false, true}) {
      c10d::AllreduceOptions opts;
      opts.reduceOp = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
      Tensors tensors{sample(rank, 1000)};
      const auto work = backend->allreduce(tensors, opts);
      EXPECT_TRUE(work->wait());
      EXPECT_TRUE(work->isCompleted());
      EXPECT_TRUE(at::equal(tensors[0], average ? expected / 3.0 : expected));
      EXPECT_TRUE(work->getFuture()->completed());
      EXPECT_TRUE(work->getFuture()->value().toTensorVector()[0].is_same(tensors[0]));
    }
    Tensors counts{at::full({2}, rank, at::kInt)};
    c10d::AllreduceOptions max;
    max.reduceOp = c10d::ReduceOp::MAX;
    backend->allreduce(counts, max)->wait();
    EXPECT_EQ(counts[0][0].item<int>(), 2);
  });
}

TEST(ThreadBackend, OtherCollectives) {
  run_ranks(2, [](int rank, const Backend& backend) {
    Tensors broadcast{at::full({2}, rank)};
    c10d::BroadcastOptions from_one;
    from_one.rootRank = 1;
    backend->broadcast(broadcast, from_one)->wait();
    EXPECT_EQ(broadcast[0][0].item<int>(), 1);

    at::Tensor own = at::full({2}, rank), gathered = at::zeros({4}, at::kLong);
    backend->_allgather_base(gathered, own)->wait();
    EXPECT_TRUE(at::equal(gathered, at::arange(4).floor_divide(2)));

    at::Tensor sent = at::arange(2) + 10 * rank, received = at::zeros({2}, at::kLong);
    std::vector<int64_t> equal_parts;
    backend->alltoall_base(received, sent, equal_parts, equal_parts)->wait();
    EXPECT_TRUE(at::equal(received, at::arange(2) * 10 + rank));

    backend->barrier()->wait();
    EXPECT_EQ(backend->calls().size(), 4u);
    EXPECT_EQ(backend->calls()[0].operation, "broadcast");
    EXPECT_EQ(backend->calls()[0].numel, 2);
  });
}

TEST(ThreadBackend, InjectedFailureReachesThePeersWork) {
  run_ranks(3, [](int rank, const Backend& backend) {
    if (rank == 1) backend->inject_failure(1);
    Tensors tensors{at::ones({4})};
    backend->allreduce(tensors)->wait();
    c10::intrusive_ptr<c10d::Work> work;
    const std::string thrown = error_of([&] { work = backend->allreduce(tensors); });
    if (rank == 1) {
      EXPECT_TRUE(contains(thrown, "allreduce on rank 1: injected failure")) << thrown;
      return;
    }
    EXPECT_EQ(thrown, "no error");
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(work->getFuture()->hasError());
    const std::string error = error_of([&] { work->wait(); });
    EXPECT_TRUE(contains(error, "rank 1 is gone: injected failure")) << error;
    EXPECT_EQ(tensors[0][0].item<float>(), 3);  // unchanged
  });
}

TEST(ThreadBackend, TimeOutNamesWhoIsMissing) {
  run_ranks(3, [](int rank, const Backend& backend) {
    if (rank == 2) return;
    backend->setTimeout(milliseconds(50));
    Tensors tensors{at::ones({4})};
    const std::string error = error_of([&] { backend->allreduce(tensors)->wait(); });
    EXPECT_TRUE(contains(error, "timed out after 50 ms")) << error;
    EXPECT_TRUE(contains(error, "waiting for rank 2")) << error;
  });
}

TEST(ThreadBackend, MismatchIsAnError) {
  run_ranks(2, [](int rank, const Backend& backend) {
    Tensors tensors{at::ones({rank + 1})};
    const std::string error = error_of([&] { backend->allreduce(tensors)->wait(); });
    EXPECT_TRUE(contains(error, "collective mismatch")) << error;
  });
}

TEST(ThreadBackend, TwoThreadsAtOnceAreAnError) {
  run_ranks(2, [](int rank, const Backend& backend) {
    Tensors tensors{at::ones({1})};
    if (rank == 0) {
      backend->on_call([&](const ThreadBackend::Call&) {
        backend->on_call(nullptr);
        std::string error;
        std::thread([&] { error = error_of([&] { backend->allreduce(tensors); }); }).join();
        EXPECT_TRUE(contains(error, "two threads")) << error;
      });
    }
    backend->allreduce(tensors)->wait();
  });
}

TEST(ThreadBackend, TensorsWithHolesAreAnError) {
  const auto backends = make_thread_backends(1);
  Tensors tensors{at::ones({4, 4}).slice(1, 0, 2)};
  EXPECT_TRUE(contains(error_of([&] { backends[0]->allreduce(tensors); }), "without holes"));
}

TEST(RunRanks, RethrowsAndDoesNotLeavePeersWaiting) {
  const std::string error = error_of([] {
    run_ranks(2, [](int rank, const Backend& backend) {
      if (rank == 1) throw std::runtime_error("rank one's own error");
      backend->barrier()->wait();
    });
  });
  EXPECT_EQ(error, "rank one's own error");
}

TEST(RunRanksDeathTest, ADeadlockAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto hang = [](int rank, const Backend&) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(30));
  };
  EXPECT_DEATH(run_ranks(2, hang, milliseconds(100)), "still running: rank 1");
}

}  // namespace
}  // namespace powersgd::test

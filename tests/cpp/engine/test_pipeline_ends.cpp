// SPDX-License-Identifier: BSD-3-Clause
//
// Threads that begin or end while a pipeline does.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine/flight.h"
#include "engine/jobs.h"
#include "engine/pipeline.h"
#include "engine/work.h"

namespace powersgd {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Threads that want the pipeline's mutex all the time: what is between two of its sections takes
// long enough for others.
class Contention {
 public:
  explicit Contention(const std::shared_ptr<Pipeline>& pipeline) {
    for (int i = 0; i < 6; ++i) {
      threads_.emplace_back([this, pipeline] {
        while (!done_) pipeline->close(std::chrono::hours(1));
      });
    }
  }
  ~Contention() {
    done_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::vector<std::thread> threads_;
};

// A thread that nobody joins would end the process.
TEST(PipelineEnds, APartMayBeginItsCollectiveAtAnyMomentOfTheEnd) {
  for (int i = 0; i < 200; ++i) {
    auto pipeline = std::make_shared<Pipeline>(test::connection_of_one());
    const auto work = c10::make_intrusive<WorkPowerSGD>(0, std::vector<at::Tensor>{});
    const auto end = Clock::now() + milliseconds(3);
    Job job = test::job_of(
        [end](Channel& channel) {
          at::Tensor in = at::ones({1}), out = at::empty({1});
          while (Clock::now() < end) std::this_thread::yield();
          channel.allgather(out, in, nullptr);
        },
        [](Channel&) {});
    pipeline->submit(std::make_shared<Flight>(work, std::move(job), at::kCPU, milliseconds(-1)));
    {
      const Contention contention(pipeline);
      pipeline->close(std::chrono::duration_cast<milliseconds>(end - Clock::now()));
      pipeline->end_threads();
    }
    while (!work->isCompleted()) std::this_thread::yield();
  }
}

}  // namespace
}  // namespace powersgd

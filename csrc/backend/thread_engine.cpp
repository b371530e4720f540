// SPDX-License-Identifier: BSD-3-Clause
#include "backend/thread_engine.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <utility>

#include "backend/work.h"

namespace powersgd {
namespace {

// For jobs in flight when the engine is shut down, and when it is aborted: then peers no longer answer.
constexpr std::chrono::seconds kShutdownGrace(10);
constexpr std::chrono::seconds kAbortGrace(1);

class BlockingLane final : public Lane {
 public:
  BlockingLane(c10d::Backend& backend, std::chrono::milliseconds timeout)
      : backend_(backend), timeout_(timeout) {}

  void allreduce(at::Tensor& payload) override {
    std::vector<at::Tensor> tensors = {payload};
    c10d::AllreduceOptions options;
    options.timeout = timeout_;
    backend_.allreduce(tensors, options)->wait();
  }

 private:
  c10d::Backend& backend_;
  const std::chrono::milliseconds timeout_;
};

struct QueuedJob {
  c10::intrusive_ptr<WorkPowerSGD> work;
  Engine::Job job;
  std::chrono::milliseconds timeout;
};

std::exception_ptr closed_error() {
  return std::make_exception_ptr(C10_BUILD_ERROR(
      DistBackendError, "powersgd: this process group was shut down or aborted before the allreduce "
                        "ran"));
}

// Engines alive in this process.
std::mutex engines_mutex;
std::set<ThreadEngine*>& engines() {
  static auto* const all = new std::set<ThreadEngine*>;
  return *all;
}

}  // namespace

struct ThreadEngine::Shared {
  c10::intrusive_ptr<c10d::Backend> lane;
  std::mutex mutex;
  std::condition_variable wake;   // the worker: a job, or closed
  std::condition_variable ended;  // those who stop the engine: the worker has ended
  std::deque<QueuedJob> queue;
  bool closed = false;
  bool worker_ended = false;
  int num_threads = 0;

  void serve() {
    c10::setThreadName("powersgd");
    // Grad mode is thread-local; the kernels and payloads must never be recorded.
    const at::NoGradGuard no_grad;
    std::unique_lock<std::mutex> lock(mutex);
    int threads_set = 0;
    while (true) {
      wake.wait(lock, [this] { return closed || !queue.empty(); });
      if (queue.empty()) break;
      QueuedJob next = std::move(queue.front());
      queue.pop_front();
      const int threads_wanted = num_threads;
      lock.unlock();
      // The thread count of OpenMP is per thread too: take over the submitter's.
      if (threads_wanted != threads_set) at::set_num_threads(threads_set = threads_wanted);
      run(next);
      lock.lock();
    }
    worker_ended = true;
    ended.notify_all();
  }

  void run(QueuedJob& next) {
    std::exception_ptr error;
    try {
      BlockingLane blocking(*lane, next.timeout);
      next.job(blocking);
    } catch (...) {
      error = std::current_exception();
    }
    next.job = nullptr;
    next.work->complete(std::move(error));
  }
};

ThreadEngine::ThreadEngine(int rank, c10::intrusive_ptr<c10d::Backend> lane)
    : rank_(rank), shared_(std::make_shared<Shared>()) {
  shared_->lane = std::move(lane);
  worker_ = std::thread([shared = shared_] { shared->serve(); });
  const std::lock_guard<std::mutex> lock(engines_mutex);
  engines().insert(this);
}

ThreadEngine::~ThreadEngine() {
  {
    const std::lock_guard<std::mutex> lock(engines_mutex);
    engines().erase(this);
  }
  stop(/*run_queued=*/true);
}

c10::intrusive_ptr<c10d::Work> ThreadEngine::submit(std::vector<at::Tensor> tensors, Job job,
                                                    std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<WorkPowerSGD>(rank_, std::move(tensors));
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->closed) std::rethrow_exception(closed_error());
  shared_->num_threads = at::get_num_threads();
  shared_->queue.push_back({work, std::move(job), timeout});
  shared_->wake.notify_one();
  return work;
}

void ThreadEngine::shutdown() { stop(/*run_queued=*/true); }

void ThreadEngine::abort() { stop(/*run_queued=*/false); }

void ThreadEngine::stop(bool run_queued) {
  if (!worker_.joinable()) return;  // stopped before
  std::deque<QueuedJob> failed;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
    if (!run_queued) failed.swap(shared_->queue);
    shared_->wake.notify_all();
    ended = shared_->ended.wait_for(lock, run_queued ? kShutdownGrace : kAbortGrace,
                                    [this] { return shared_->worker_ended; });
    if (!ended && run_queued) failed.swap(shared_->queue);
  }
  for (QueuedJob& job : failed) job.work->complete(closed_error());
  if (ended) {
    worker_.join();
  } else {
    worker_.detach();
  }
}

void shutdown_all_engines() {
  const std::lock_guard<std::mutex> lock(engines_mutex);
  for (ThreadEngine* engine : engines()) engine->shutdown();
}

}  // namespace powersgd

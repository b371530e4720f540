// SPDX-License-Identifier: BSD-3-Clause
#include "engine/thread_engine.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/flight.h"
#include "engine/mailboxes.h"

namespace powersgd {
namespace {

using FlightPtr = std::shared_ptr<Flight>;

// Objects that an engine remembers before it drops those that no job waits for.
constexpr size_t kManyObjects = 4096;

constexpr const char* kWorkerName = "powersgd";

// The engines that are alive in this process.
std::mutex engines_mutex;
std::set<ThreadEngine*>& engines() {
  static auto* const all = new std::set<ThreadEngine*>;
  return *all;
}

}  // namespace

class ThreadEngine::Shared : public std::enable_shared_from_this<Shared> {
 public:
  explicit Shared(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  const std::shared_ptr<Connection>& connection() const { return connection_; }

  void submit(const FlightPtr& flight, const Job& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw_closed();
    flight->number = ++submitted_;
    if (job.exchange) flight->in_series = ++exchanges_;
    flight->after = job.alone ? submitted_ - 1 : last_alone_;
    if (job.alone) last_alone_ = submitted_;
    for (const void* object : job.changes) {
      flight->after = std::max(flight->after, std::exchange(last_job_[object], submitted_));
    }
    drop_ended_jobs();
    num_threads_ = at::get_num_threads();
    ready_[0].push_back(flight);
    if (submitted_ == 1) {
      worker_runs_ = true;
      start([this] { work(); });
    }
    changed_.notify_all();
  }

  // Refuses new jobs. Those in flight have `grace`, or what is left of an earlier one, to end.
  void close(std::chrono::milliseconds grace) {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    grace_ends_ = std::min(grace_ends_, std::chrono::steady_clock::now() + grace);
    changed_.notify_all();
  }

  // Fails the jobs that no thread holds, and ends the waits of those in flight.
  void abort() {
    std::vector<FlightPtr> failed, done, in_flight;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
      for (auto& [part, queue] : ready_) move_all(queue, failed);
      for (auto& [number, flight] : done_) done.push_back(std::move(flight));
      done_.clear();
      for (const auto& [part, queue] : in_flight_) {
        in_flight.insert(in_flight.end(), queue.begin(), queue.end());
      }
      changed_.notify_all();
    }
    for (const FlightPtr& flight : in_flight) flight->abort();
    for (const FlightPtr& flight : done) flight->complete();
    for (const FlightPtr& flight : failed) cancel(flight);
  }

  // Returns the threads once they have ended, or when the grace has: then they still run.
  std::pair<std::vector<std::thread>, bool> wait_for_threads() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (running_ > 0 && std::chrono::steady_clock::now() < grace_ends_) {
      changed_.wait_until(lock, grace_ends_);
    }
    return {std::exchange(threads_, {}), running_ == 0};
  }

 private:
  static void move_all(std::deque<FlightPtr>& from, std::vector<FlightPtr>& to) {
    for (; !from.empty(); from.pop_front()) to.push_back(std::move(from.front()));
  }

  void start(std::function<void()> body) {
    ++running_;
    threads_.emplace_back([self = shared_from_this(), body = std::move(body)] {
      body();
      const std::lock_guard<std::mutex> lock(self->mutex_);
      --self->running_;
      self->changed_.notify_all();
    });
  }

  // Bounds last_job_. No job waits for an object whose last job has ended.
  void drop_ended_jobs() {
    if (last_job_.size() < kManyObjects) return;
    for (auto it = last_job_.begin(); it != last_job_.end();) {
      it = it->second <= ended_ ? last_job_.erase(it) : std::next(it);
    }
  }

  // The worker.

  void work() {
    c10::setThreadName(kWorkerName);
    int threads_set = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (FlightPtr flight = take(lock)) {
      const int threads_wanted = num_threads_;
      lock.unlock();
      // OpenMP counts threads per thread as well, so the worker takes over the submitter's count.
      if (threads_wanted != threads_set) at::set_num_threads(threads_set = threads_wanted);
      if (flight->parts_begun() == 0) open(*flight);
      flight->run();
      lock.lock();
      if (aborted_) {
        lock.unlock();
        cancel(flight);
        lock.lock();
      } else if (flight->in_flight()) {
        put_in_flight(std::move(flight));
      } else if (flight->done()) {
        const uint64_t number = flight->number;
        done_.emplace(number, std::move(flight));
        end_in_order(lock);
      } else {
        const size_t part = flight->parts_begun();
        ready_[part].push_front(std::move(flight));
      }
    }
    worker_runs_ = false;
    lock.unlock();
    mailboxes_.clear();
  }

  void open(Flight& flight) {
    auto connect = [this](std::chrono::milliseconds timeout) {
      DirectChannel::BackendPtr backend = connection_->backend(timeout);
      c10::setThreadName(kWorkerName);  // torch 2.11 renames the thread that makes a Gloo backend
      const std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) throw_closed();  // which came meanwhile, and did not find the backend
      return backend;
    };
    flight.open(std::move(connect), mailboxes_.take(flight));
  }

  // Returns the next job once it may run, or null if there will be no more.
  FlightPtr take(std::unique_lock<std::mutex>& lock) {
    std::deque<FlightPtr>* queue = nullptr;
    changed_.wait(lock, [&] {
      queue = next_queue();
      return aborted_ || queue != nullptr || (closed_ && ended_ == submitted_);
    });
    if (aborted_ || queue == nullptr) return nullptr;
    FlightPtr flight = std::move(queue->front());
    queue->pop_front();
    return flight;
  }

  std::deque<FlightPtr>* next_queue() {
    for (auto& [part, queue] : ready_) {
      if (!queue.empty() && (part > 0 || ended_ >= queue.front()->after)) return &queue;
    }
    return nullptr;
  }

  void put_in_flight(FlightPtr flight) {
    const size_t part = flight->parts_begun() - 1;
    if (in_flight_.count(part) == 0) start([this, part] { wait_for_messages(part); });
    in_flight_[part].push_back(std::move(flight));
    changed_.notify_all();
  }

  void end_in_order(std::unique_lock<std::mutex>& lock) {
    while (!done_.empty() && done_.begin()->first == ended_ + 1) {
      const FlightPtr flight = std::move(done_.begin()->second);
      done_.erase(done_.begin());
      lock.unlock();
      flight->complete();  // what it frees may take other locks
      lock.lock();
      ++ended_;
      const bool more = !closed_;
      changed_.notify_all();
      lock.unlock();
      const bool posted = mailboxes_.put(*flight, more);
      lock.lock();
      if (flight->failed() || !posted) lost_.push_back(flight);
    }
  }

  // The threads that wait.

  void wait_for_messages(size_t part) {
    c10::setThreadName("powersgd_wait");
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<FlightPtr>& queue = in_flight_[part];
    while (true) {
      changed_.wait(lock, [&] { return aborted_ || !worker_runs_ || !queue.empty(); });
      if (queue.empty()) return;
      const FlightPtr flight = queue.front();
      lock.unlock();
      flight->wait();
      lock.lock();
      queue.pop_front();
      if (aborted_) {
        lock.unlock();
        cancel(flight);
        lock.lock();
      } else {
        ready_[part + 1].push_back(flight);
        changed_.notify_all();
      }
    }
  }

  void cancel(const FlightPtr& flight) {
    if (!flight->done()) flight->cancel();
    flight->complete();
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_.push_back(flight);
  }

  const std::shared_ptr<Connection> connection_;
  Mailboxes mailboxes_;  // the worker's

  std::mutex mutex_;                 // guards the members below
  std::condition_variable changed_;  // notified when one of them changes
  std::map<size_t, std::deque<FlightPtr>> ready_;      // by the part that is to run next
  std::map<size_t, std::deque<FlightPtr>> in_flight_;  // by the part that began the collective
  std::map<uint64_t, FlightPtr> done_;                 // by number, until those before have ended
  std::vector<FlightPtr> lost_;  // whose messages may still come, to memory that they keep
  uint64_t submitted_ = 0, exchanges_ = 0, last_alone_ = 0;
  uint64_t ended_ = 0;
  std::unordered_map<const void*, uint64_t> last_job_;  // the last job that changes an object
  bool closed_ = false;                                 // no more jobs
  bool aborted_ = false;                                // jobs that have not ended are failed
  bool worker_runs_ = false;
  int num_threads_ = 0;
  // Until then, whoever ends the engine waits for the threads. An abort makes it sooner.
  std::chrono::steady_clock::time_point grace_ends_ = std::chrono::steady_clock::time_point::max();
  std::vector<std::thread> threads_;
  int running_ = 0;  // threads
};

ThreadEngine::ThreadEngine(int rank, std::shared_ptr<Connection> connection, Grace grace)
    : rank_(rank), grace_(grace), shared_(std::make_shared<Shared>(std::move(connection))) {
  const std::lock_guard<std::mutex> lock(engines_mutex);
  engines().insert(this);
}

ThreadEngine::~ThreadEngine() {
  {
    const std::lock_guard<std::mutex> lock(engines_mutex);
    engines().erase(this);
  }
  shutdown();
}

c10::intrusive_ptr<c10d::Work> ThreadEngine::submit(std::vector<at::Tensor> tensors, Job job,
                                                    c10::Device device,
                                                    std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<WorkPowerSGD>(rank_, std::move(tensors));
  const auto flight = std::make_shared<Flight>(work, std::move(job), device, timeout);
  shared_->submit(flight, flight->job());
  return work;
}

void ThreadEngine::connect(c10::Device device) {
  Job job = job_alone([connection = shared_->connection()](Channel&) { connection->backend(); });
  submit({}, std::move(job), device, c10d::kUnsetTimeout);
}

void ThreadEngine::shutdown() {
  shared_->close(grace_.shutdown);
  end_threads();
}

void ThreadEngine::abort() {
  shared_->close(grace_.abort);
  shared_->abort();
  end_threads();
}

void ThreadEngine::end_threads() {
  auto [threads, ended] = shared_->wait_for_threads();
  if (!ended) shared_->abort();
  for (std::thread& thread : threads) ended ? thread.join() : thread.detach();
}

std::exception_ptr closed_error() {
  return std::make_exception_ptr(
      C10_BUILD_ERROR(DistBackendError,
                      "powersgd: this process group was shut down or aborted before the allreduce "
                      "ran"));
}

void throw_closed() { std::rethrow_exception(closed_error()); }

void shutdown_all_engines() {
  const std::lock_guard<std::mutex> lock(engines_mutex);
  for (ThreadEngine* engine : engines()) engine->shared_->close(engine->grace_.shutdown);
  for (ThreadEngine* engine : engines()) engine->end_threads();
}

}  // namespace powersgd

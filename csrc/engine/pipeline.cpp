// SPDX-License-Identifier: BSD-3-Clause
#include "engine/pipeline.h"

#include <ATen/Parallel.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <iterator>

namespace powersgd {
namespace {

// Above this number, an engine forgets the objects that no job waits for.
constexpr size_t kManyObjects = 4096;

constexpr const char* kWorkerName = "powersgd";
constexpr const char* kWaiterName = "powersgd_wait";

}  // namespace

void Pipeline::submit(const FlightPtr& flight) {
  const Job& job = flight->job();
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

// No job waits for an object whose last job has ended.
void Pipeline::drop_ended_jobs() {
  if (last_job_.size() < kManyObjects) return;
  for (auto it = last_job_.begin(); it != last_job_.end();) {
    it = it->second <= ended_ ? last_job_.erase(it) : std::next(it);
  }
}

void Pipeline::start(std::function<void()> body) {
  ++running_;
  threads_.emplace_back([self = shared_from_this(), body = std::move(body)] {
    body();
    const std::lock_guard<std::mutex> lock(self->mutex_);
    --self->running_;
    self->changed_.notify_all();
  });
}

void Pipeline::work() {
  c10::setThreadName(kWorkerName);
  int threads_set = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (FlightPtr flight = take(lock)) {
    const int threads_wanted = num_threads_;
    lock.unlock();
    // OpenMP's number of threads is per thread, so the worker takes over the submitter's.
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

void Pipeline::open(Flight& flight) {
  auto connect = [this](std::chrono::milliseconds timeout) {
    DirectChannel::BackendPtr backend = connection_->backend(timeout);
    c10::setThreadName(kWorkerName);  // torch 2.11 renames the thread that makes a Gloo backend
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) throw_closed();  // the abort came meanwhile and found no backend
    return backend;
  };
  flight.open(std::move(connect), mailboxes_.take(flight));
}

// Returns the next job once it may run, or null if there will be no more.
Pipeline::FlightPtr Pipeline::take(std::unique_lock<std::mutex>& lock) {
  Queue* queue = nullptr;
  changed_.wait(lock, [&] {
    queue = next_queue();
    return aborted_ || queue != nullptr || (closed_ && ended_ == submitted_);
  });
  if (aborted_ || queue == nullptr) return nullptr;
  FlightPtr flight = std::move(queue->front());
  queue->pop_front();
  return flight;
}

// Earlier parts come first, because more messages follow from them.
Pipeline::Queue* Pipeline::next_queue() {
  for (auto& [part, queue] : ready_) {
    if (!queue.empty() && (part > 0 || ended_ >= queue.front()->after)) return &queue;
  }
  return nullptr;
}

void Pipeline::put_in_flight(FlightPtr flight) {
  const size_t part = flight->parts_begun() - 1;
  if (in_flight_.count(part) == 0) start([this, part] { wait_for_messages(part); });
  in_flight_[part].push_back(std::move(flight));
  changed_.notify_all();
}

void Pipeline::end_in_order(std::unique_lock<std::mutex>& lock) {
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

void Pipeline::wait_for_messages(size_t part) {
  c10::setThreadName(kWaiterName);
  std::unique_lock<std::mutex> lock(mutex_);
  Queue& queue = in_flight_[part];
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

void Pipeline::close(std::chrono::milliseconds grace) {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  grace_ends_ = std::min(grace_ends_, std::chrono::steady_clock::now() + grace);
  changed_.notify_all();
}

void Pipeline::abort() {
  std::vector<FlightPtr> held, in_flight;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    ++running_;  // it may undo jobs
    for (auto& [number, flight] : done_) held.push_back(std::move(flight));
    done_.clear();
    for (auto& [part, queue] : ready_) {
      held.insert(held.end(), queue.begin(), queue.end());
      queue.clear();
    }
    for (const auto& [part, queue] : in_flight_) {
      in_flight.insert(in_flight.end(), queue.begin(), queue.end());
    }
    changed_.notify_all();
  }
  for (const FlightPtr& flight : in_flight) flight->abort();
  for (const FlightPtr& flight : held) cancel(flight);
  const std::lock_guard<std::mutex> lock(mutex_);
  --running_;
  changed_.notify_all();
}

void Pipeline::wait_for_end() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return running_ == 0; });
}

void Pipeline::cancel(const FlightPtr& flight) {
  if (!flight->done()) flight->cancel();
  flight->complete();
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_.push_back(flight);
}

void Pipeline::end_threads() {
  std::vector<std::thread> threads;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (running_ > 0 && std::chrono::steady_clock::now() < grace_ends_) {
      changed_.wait_until(lock, grace_ends_);
    }
    ended = running_ == 0;
    aborted_ = aborted_ || !ended;  // so no thread begins that nobody would take
    threads.swap(threads_);
  }
  if (!ended) abort();
  for (std::thread& thread : threads) ended ? thread.join() : thread.detach();
}

}  // namespace powersgd

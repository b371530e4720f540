// SPDX-License-Identifier: BSD-3-Clause
#include "engine/callback_threads.h"

#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace powersgd {
namespace {

constexpr std::chrono::seconds kIdleLife(30);
constexpr std::chrono::seconds kExitGrace(10);

void report(const char* error) { LOG(ERROR) << "powersgd: a future's callback threw: " << error; }

void call(const std::function<void()>& callback) {
  try {
    callback();
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    // Not an exception but the end of this thread: an exiting Python interpreter forces it.
    if (!std::current_exception()) throw;
    report("unknown exception");
  }
}

class CallbackThreads {
 public:
  void run(std::function<void()> callback) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) {
      // Leaked on purpose: it may own objects that only the interpreter can destroy.
      new std::function<void()>(std::move(callback));
      return;
    }
    queue_.push_back(std::move(callback));
    if (queue_.size() > idle_) {
      std::thread([this] { serve(); }).detach();
    } else {
      wake_.notify_one();
    }
  }

  void end() {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_ = true;
    // A queued callback will get a thread, so it counts as running.
    quiet_.wait_for(lock, kExitGrace, [this] { return queue_.empty() && running_ == 0; });
  }

 private:
  void serve() {
    c10::setThreadName("powersgd-then");
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      const bool found = wake_.wait_for(lock, kIdleLife, [this] { return !queue_.empty(); });
      --idle_;
      if (!found) return;
      std::function<void()> callback = std::move(queue_.front());
      queue_.pop_front();
      ++running_;
      lock.unlock();
      call(callback);
      callback = nullptr;  // destroying what it owns may take other locks
      lock.lock();
      --running_;
      quiet_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  std::condition_variable quiet_;
  size_t idle_ = 0;
  size_t running_ = 0;
  bool ended_ = false;
};

// Never destroyed: detached threads use it until the process ends.
CallbackThreads& threads() {
  static auto* const all = new CallbackThreads;
  return *all;
}

}  // namespace

void run_callback(std::function<void()> callback) { threads().run(std::move(callback)); }

void end_callbacks() { threads().end(); }

}  // namespace powersgd

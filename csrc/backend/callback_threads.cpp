// SPDX-License-Identifier: BSD-3-Clause
#include "backend/callback_threads.h"

#include <c10/util/Logging.h>

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

class CallbackThreads {
 public:
  void run(std::function<void()> callback) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(callback));
    if (queue_.size() > idle_) {
      std::thread([this] { serve(); }).detach();
    } else {
      wake_.notify_one();
    }
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      const bool found = wake_.wait_for(lock, kIdleLife, [this] { return !queue_.empty(); });
      --idle_;
      if (!found) return;
      std::function<void()> callback = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      try {
        callback();
        callback = nullptr;  // what it owns may take other locks
      } catch (const std::exception& error) {
        LOG(ERROR) << "powersgd: a future's callback threw: " << error.what();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;
};

}  // namespace

void run_callback(std::function<void()> callback) {
  // Never destroyed: detached threads use it until the process ends.
  static auto* const threads = new CallbackThreads;
  threads->run(std::move(callback));
}

}  // namespace powersgd

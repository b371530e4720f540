// SPDX-License-Identifier: BSD-3-Clause
#include "engine/thread_engine.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "engine/backend_channel.h"
#include "engine/profiler_context.h"
#include "engine/work.h"

namespace powersgd {
namespace {

// Objects that an engine remembers before it drops those that no job waits for.
constexpr size_t kManyObjects = 4096;

std::shared_ptr<c10::Event> record_current_stream(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  auto event = std::make_shared<c10::Event>(device.type());
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

// Runs a part on a side stream of the accelerator, after `ready`. The part has ended on the device
// when this returns, so that later parts and waiters need no stream.
void run_on_side_stream(c10::Device device, c10::Event& ready, const std::function<void()>& part) {
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream side = impl.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  const c10::StreamGuard guard(side);
  ready.block(side);
  const auto synchronize = [&] {
    c10::Event done(device.type());
    done.record(side);
    done.synchronize();
  };
  try {
    part();
  } catch (...) {
    synchronize();
    throw;
  }
  synchronize();
}

// The engines that are alive in this process.
std::mutex engines_mutex;
std::set<ThreadEngine*>& engines() {
  static auto* const all = new std::set<ThreadEngine*>;
  return *all;
}

}  // namespace

struct ThreadEngine::Shared {
  struct QueuedJob {
    c10::intrusive_ptr<WorkPowerSGD> work;
    Job job;
    c10::Device device;
    std::shared_ptr<c10::Event> ready;        // recorded on the caller's stream; null on the CPU
    std::optional<ProfilerContext> profiler;  // of the thread that submitted the job
    std::chrono::milliseconds timeout;
    uint64_t number;  // 1, 2, ... in the order of submission
    uint64_t after;   // the job that must have ended before this one begins
    std::exception_ptr error;
  };

  explicit Shared(std::shared_ptr<Channels> channels) : channels(std::move(channels)) {}

  const std::shared_ptr<Channels> channels;
  std::mutex mutex;
  std::condition_variable changed;              // notified when a member below changes
  std::array<std::deque<QueuedJob>, 2> queues;  // by the part that is to run next
  uint64_t submitted = 0;
  uint64_t ended = 0;                            // jobs end in the order of submission
  bool closed = false;                           // no more jobs
  bool aborted = false;                          // jobs that have not begun are failed
  std::array<bool, 2> worker_ended{true, true};  // until they are started
  // Until then, whoever ends the engine waits for the workers. An abort makes it sooner.
  std::chrono::steady_clock::time_point grace_ends = std::chrono::steady_clock::time_point::max();
  int num_threads = 0;
  std::unordered_map<const void*, uint64_t> last_job;  // the last job that changes an object

  // Bounds last_job. No job waits for an object whose last job has ended.
  void drop_ended_jobs() {
    if (last_job.size() < kManyObjects) return;
    for (auto it = last_job.begin(); it != last_job.end();) {
      it = it->second <= ended ? last_job.erase(it) : std::next(it);
    }
  }

  // Runs one worker: it takes part 0 or part 1 of every job.
  void serve(size_t part) {
    c10::setThreadName(part == 0 ? "powersgd_p" : "powersgd_q");
    // Grad mode is thread-local, and autograd must never record kernels or payloads.
    const at::NoGradGuard no_grad;
    std::unique_lock<std::mutex> lock(mutex);
    int threads_set = 0;
    while (std::optional<QueuedJob> next = take(part, lock)) {
      const int threads_wanted = num_threads;
      const uint64_t number = next->number;
      const bool alone = next->job.alone;
      lock.unlock();
      // OpenMP counts threads per thread as well, so the worker takes over the submitter's count.
      if (threads_wanted != threads_set) at::set_num_threads(threads_set = threads_wanted);
      run(part, *next);
      if (part == 0) {
        pass_on(std::move(*next));
      } else {
        end(*next);
      }
      next.reset();  // destroying what it owns may take other locks
      lock.lock();
      if (part == 0 && alone) changed.wait(lock, [&] { return aborted || ended >= number; });
    }
    worker_ended[part] = true;
    changed.notify_all();
  }

  // Returns true if both workers end before the grace does.
  bool wait_for_workers(std::unique_lock<std::mutex>& lock) {
    const auto ended = [this] { return worker_ended[0] && worker_ended[1]; };
    while (!ended() && std::chrono::steady_clock::now() < grace_ends) {
      changed.wait_until(lock, grace_ends);
    }
    return ended();
  }

  // Returns the next job once it may begin, or nothing if there will be no more.
  std::optional<QueuedJob> take(size_t part, std::unique_lock<std::mutex>& lock) {
    std::deque<QueuedJob>& queue = queues[part];
    changed.wait(lock, [&] {
      if (aborted) return true;
      if (!queue.empty()) return part == 1 || ended >= queue.front().after;
      return part == 0 ? closed : worker_ended[0];
    });
    if (queue.empty() || aborted) return std::nullopt;
    QueuedJob next = std::move(queue.front());
    queue.pop_front();
    return next;
  }

  // Queues a job for its second part, or fails it after abort.
  void pass_on(QueuedJob job) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!aborted) {
        queues[1].push_back(std::move(job));
        changed.notify_all();
        return;
      }
    }
    job.work->complete(closed_error());
  }

  void end(const QueuedJob& job) {
    job.work->complete(job.error);
    const std::lock_guard<std::mutex> lock(mutex);
    ended = job.number;
    changed.notify_all();
  }

  // Connects the channels if they are not. An abort may have come meanwhile, and not found them.
  c10d::Backend& channel(size_t part, std::chrono::milliseconds timeout) {
    c10d::Backend& connected = channels->at(part, timeout);
    const std::lock_guard<std::mutex> lock(mutex);
    if (aborted) throw_closed();
    return connected;
  }

  void run(size_t part, QueuedJob& next) {
    std::function<void(Channel&)>& body = part == 0 ? next.job.first : next.job.second;
    if (body && !next.error) {
      try {
        std::optional<ProfilerContext::Guard> observed;
        if (next.profiler) observed.emplace(*next.profiler);
        BackendChannel part_channel([&]() -> c10d::Backend& { return channel(part, next.timeout); },
                                    next.timeout);
        if (next.ready) {
          run_on_side_stream(next.device, *next.ready, [&] { body(part_channel); });
        } else {
          body(part_channel);
        }
      } catch (...) {
        next.error = std::current_exception();
      }
    }
    body = nullptr;  // frees what it holds
  }
};

ThreadEngine::ThreadEngine(int rank, std::shared_ptr<Channels> channels, Grace grace)
    : rank_(rank), grace_(grace), shared_(std::make_shared<Shared>(std::move(channels))) {
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
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->closed) throw_closed();
  start_workers();
  shared_->num_threads = at::get_num_threads();
  const uint64_t number = ++shared_->submitted;
  uint64_t after = job.alone ? number - 1 : 0;
  for (const void* object : job.changes) {
    after = std::max(after, std::exchange(shared_->last_job[object], number));
  }
  shared_->drop_ended_jobs();
  shared_->queues[0].push_back({work, std::move(job), device, record_current_stream(device),
                                ProfilerContext::current(), timeout, number, after, nullptr});
  shared_->changed.notify_all();
  return work;
}

void ThreadEngine::start_workers() {
  for (size_t part = 0; part < workers_.size(); ++part) {
    if (workers_[part].joinable()) continue;
    workers_[part] = std::thread([shared = shared_, part] { shared->serve(part); });
    shared_->worker_ended[part] = false;
  }
}

void ThreadEngine::connect(c10::Device device) {
  Job job = job_alone([channels = shared_->channels](Channel&) { channels->at(1); });
  submit({}, std::move(job), device, c10d::kUnsetTimeout);
}

void ThreadEngine::shutdown() {
  close(grace_.shutdown);
  end_workers();
}

void ThreadEngine::abort() {
  close(grace_.abort);
  fail_queued();
  end_workers();
}

void ThreadEngine::close(std::chrono::milliseconds grace) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->closed = true;
  shared_->grace_ends = std::min(shared_->grace_ends, std::chrono::steady_clock::now() + grace);
  shared_->changed.notify_all();
}

void ThreadEngine::fail_queued() {
  std::deque<Shared::QueuedJob> failed;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->aborted = true;
    for (std::deque<Shared::QueuedJob>& queue : shared_->queues) {
      for (; !queue.empty(); queue.pop_front()) failed.push_back(std::move(queue.front()));
    }
    shared_->changed.notify_all();
  }
  for (Shared::QueuedJob& job : failed) job.work->complete(closed_error());
}

void ThreadEngine::end_workers() {
  std::array<std::thread, 2> workers;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    ended = shared_->wait_for_workers(lock);
    workers.swap(workers_);
  }
  if (!ended) fail_queued();
  for (std::thread& worker : workers) {
    if (!worker.joinable()) continue;  // another thread has them
    if (ended) {
      worker.join();
    } else {
      worker.detach();
    }
  }
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
  for (ThreadEngine* engine : engines()) engine->close(engine->grace_.shutdown);
  for (ThreadEngine* engine : engines()) engine->end_workers();
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#include "engine/thread_engine.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <utility>

#include "engine/flight.h"
#include "engine/pipeline.h"
#include "engine/work.h"

namespace powersgd {
namespace {

// The engines that are alive in this process.
std::mutex engines_mutex;
std::set<ThreadEngine*>& engines() {
  static auto* const all = new std::set<ThreadEngine*>;
  return *all;
}

}  // namespace

ThreadEngine::ThreadEngine(int rank, std::shared_ptr<Connection> connection, Grace grace)
    : rank_(rank), grace_(grace), pipeline_(std::make_shared<Pipeline>(std::move(connection))) {
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
  // Gloo's receives would go by the timeout that their connection was made with.
  if (timeout == c10d::kUnsetTimeout) timeout = pipeline_->connection()->timeout();
  auto work = c10::make_intrusive<WorkPowerSGD>(rank_, std::move(tensors));
  pipeline_->submit(std::make_shared<Flight>(work, std::move(job), device, timeout));
  return work;
}

void ThreadEngine::connect(c10::Device device) {
  Job job = job_alone([connection = pipeline_->connection()](Channel&) { connection->backend(); });
  (void)submit({}, std::move(job), device, c10d::kUnsetTimeout);  // the first step has its error
}

void ThreadEngine::shutdown() {
  pipeline_->close(grace_.shutdown);
  pipeline_->end_threads();
}

void ThreadEngine::abort() {
  pipeline_->close(grace_.abort);
  pipeline_->abort();
  pipeline_->end_threads();
}

// A job has left the device when the thread that ran it ends.
void ThreadEngine::wait_for_end(c10::Device /*device*/) { pipeline_->wait_for_end(); }

std::exception_ptr closed_error() {
  return std::make_exception_ptr(
      C10_BUILD_ERROR(DistBackendError,
                      "powersgd: this process group was shut down or aborted before the allreduce "
                      "ran"));
}

void throw_closed() { std::rethrow_exception(closed_error()); }

void shutdown_all_engines() {
  const std::lock_guard<std::mutex> lock(engines_mutex);
  for (ThreadEngine* engine : engines()) engine->pipeline_->close(engine->grace_.shutdown);
  for (ThreadEngine* engine : engines()) engine->pipeline_->end_threads();
}

}  // namespace powersgd

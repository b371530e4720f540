// SPDX-License-Identifier: BSD-3-Clause
#include "engine/flight.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace powersgd {
namespace {

std::shared_ptr<c10::Event> record_current_stream(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  auto event = std::make_shared<c10::Event>(device.type());
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace

Flight::Flight(c10::intrusive_ptr<WorkPowerSGD> work, Job job, c10::Device device,
               std::chrono::milliseconds timeout)
    : exchange(job.exchange),
      work_(std::move(work)),
      job_(std::move(job)),
      device_(device),
      timeout_(timeout),
      ready_(record_current_stream(device)),
      profiler_(ProfilerContext::current()) {}

void Flight::open(std::function<DirectChannel::BackendPtr(std::chrono::milliseconds)> connect,
                  Mail mail) {
  channel_.emplace([connect = std::move(connect), timeout = timeout_] { return connect(timeout); },
                   timeout_, std::move(mail));
}

void Flight::run() {
  // Grad mode is thread-local, and autograd must never record kernels or payloads.
  const at::NoGradGuard no_grad;
  std::optional<ProfilerContext::Guard> profiled;
  if (profiler_) profiled.emplace(*profiler_);
  attempt([this] { run_part(); });
}

// An exception fails the job. So does one of the device, or of undo.
void Flight::attempt(const std::function<void()>& body) {
  try {
    on_device([&] {
      try {
        body();
      } catch (...) {
        error_ = std::current_exception();
        if (next_ > 0 && job_.undo) job_.undo();
      }
    });
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

void Flight::run_part() {
  if (lost_) std::rethrow_exception(lost_);
  if (channel_->in_flight()) channel_->end();
  if (next_ == job_.parts.size()) return;
  std::function<void(Channel&)>& part = job_.parts[next_++];
  part(*channel_);
  part = nullptr;  // frees what it holds
}

// Runs `body` on a side stream of the accelerator, after all that the caller's stream had when the
// job was submitted. It has ended on the device when this returns, so later parts and waiters need
// no stream.
void Flight::on_device(const std::function<void()>& body) {
  if (!ready_) return body();
  const c10::impl::VirtualGuardImpl impl(device_.type());
  const c10::Stream side = impl.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  const c10::StreamGuard guard(side);
  ready_->block(side);
  body();
  c10::Event done(device_.type());
  done.record(side);
  done.synchronize();
}

void Flight::wait() {
  try {
    std::optional<ProfilerContext::Guard> profiled;
    if (profiler_) profiled.emplace(*profiler_);
    const std::shared_ptr<void> observed = job_.observe ? job_.observe() : nullptr;
    channel_->wait();
  } catch (...) {
    lost_ = std::current_exception();
  }
}

void Flight::cancel() {
  if (next_ == 0) {
    error_ = closed_error();
    return;
  }
  const at::NoGradGuard no_grad;
  attempt([] { throw_closed(); });
}

void Flight::complete() {
  job_ = {};
  work_->complete(error_);
  work_.reset();
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
//
// The overrides that torch 2.11 does not have.
#include "powersgd/group/forwarding_backend.h"

namespace powersgd {

using c10d::Backend;

#ifdef POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD
void ForwardingBackend::suspend() { accelerator().suspend(); }

void ForwardingBackend::resume() { accelerator().resume(); }

std::unordered_map<std::string, uint64_t> ForwardingBackend::getMemoryStats() {
  return accelerator().getMemoryStats();
}
#endif

#ifdef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
bool ForwardingBackend::supportsTimeEstimation() const {
  return inners_.at(accelerator_device())->supportsTimeEstimation();
}

void ForwardingBackend::startTimeEstimate() { accelerator().startTimeEstimate(); }

float ForwardingBackend::endTimeEstimate() { return accelerator().endTimeEstimate(); }
#endif

#ifdef POWERSGD_BACKEND_HAS_IS_INITIALIZED
bool ForwardingBackend::isInitialized() {
  return inners_.all([](Backend& inner) { return inner.isInitialized(); });
}
#endif

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
void ForwardingBackend::addEphemeralTimeout(const Milliseconds& timeout) {
  each_inner([&](Backend& inner) { inner.addEphemeralTimeout(timeout); });
}

ForwardingBackend::WorkPtr ForwardingBackend::gather_into_tensor(at::Tensor& output,
                                                                 at::Tensor& input,
                                                                 const c10d::GatherOptions& opts) {
  return collective(input.device().type(), &Backend::gather_into_tensor, output, input, opts);
}
#endif

#ifdef POWERSGD_BACKEND_HAS_VIRTUAL_BOUND_DEVICE
std::optional<at::Device> ForwardingBackend::getBoundDeviceId() const {
  return bound_device_id_ ? bound_device_id_ : inners_.at(primary_device())->getBoundDeviceId();
}

void ForwardingBackend::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  each_inner([&](Backend& inner) { inner.setBoundDeviceId(device); });
}
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
void ForwardingBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  primary().registerAbortHook(id, std::move(hook));
}

void ForwardingBackend::unregisterAbortHook(int64_t id) { primary().unregisterAbortHook(id); }
#endif

#ifdef POWERSGD_BACKEND_HAS_COMPLETION_HOOKS
bool ForwardingBackend::supportsAbortHooks() const {
  return inners_.at(primary_device())->supportsAbortHooks();
}

bool ForwardingBackend::supportsCompletionHooks() const {
  return inners_.at(primary_device())->supportsCompletionHooks();
}

void ForwardingBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  primary().registerCompletionHook(id, std::move(hook));
}

void ForwardingBackend::unregisterCompletionHook(int64_t id) {
  primary().unregisterCompletionHook(id);
}
#endif

// A reconfigured group may renumber this rank. ProcessGroup reads the rank from this object, which
// therefore waits. Two inner backends could disagree on it, so there may be only one, as in
// ProcessGroup.
#ifdef C10D_BACKEND_HAS_RECONFIGURE
namespace {

void check_is_only_one(const std::vector<BackendPtr>& inners) {
  TORCH_CHECK(inners.size() == 1,
              "a group with several inner backends cannot be reconfigured; create a new group");
}

}  // namespace

bool ForwardingBackend::supportsReconfigure() const {
  return inners_.distinct().size() == 1 && inners_.distinct().front()->supportsReconfigure();
}

c10d::ReconfigureHandle ForwardingBackend::get_reconfigure_handle() const {
  check_is_only_one(inners_.distinct());
  return inners_.distinct().front()->get_reconfigure_handle();
}

ForwardingBackend::WorkPtr ForwardingBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  check_is_only_one(inners_.distinct());
  const WorkPtr work = primary().reconfigure(opts);
  if (work) {
    work->wait();
  }
  rank_ = inners_.distinct().front()->getRank();
  size_ = inners_.distinct().front()->getSize();
  return work;
}
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
bool ForwardingBackend::supportsWindow() const {
  return inners_.at(accelerator_device())->supportsWindow();
}

c10::intrusive_ptr<c10d::Window> ForwardingBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  return inner_of(tensor ? tensor->device().type() : accelerator_device()).new_window(tensor);
}
#endif

}  // namespace powersgd

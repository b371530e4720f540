// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/forwarding_backend.h"

#include <algorithm>
#include <iterator>

#include "engine/work.h"

namespace powersgd {

using c10::DeviceType;
using c10d::Backend;

using WorkPtr = ForwardingBackend::WorkPtr;

ForwardingBackend::ForwardingBackend(int rank, int size, Inners inners)
    : Backend(rank, size), inners_(rank, size, std::move(inners)), child_store_(StorePtr()) {}

// The choice of an inner backend.

DeviceType ForwardingBackend::primary_device() const {
  if (bound_device_id_ && inners_.has(bound_device_id_->type())) {
    return bound_device_id_->type();
  }
  return accelerator_used_ ? inners_.accelerator() : inners_.list().front().first;
}

DeviceType ForwardingBackend::accelerator_device() const {
  const DeviceType primary = primary_device();
  return primary == DeviceType::CPU ? inners_.accelerator() : primary;
}

// An empty list names no device: the primary inner backend's own error is then the best one.
DeviceType ForwardingBackend::device_of(const Tensors& tensors) const {
  return tensors.empty() ? primary_device() : tensors.front().device().type();
}

DeviceType ForwardingBackend::device_of(const c10d::BarrierOptions& opts) const {
  if (opts.device) {
    return opts.device->type();
  }
  return opts.device_ids.empty() ? primary_device() : accelerator_device();
}

void ForwardingBackend::adopt(Backend& inner) const {
  if (!pg_desc_.empty() && inner.getGroupDesc() != pg_desc_) {
    inner.setGroupDesc(pg_desc_);
  }
  if (bound_device_id_ && inner.getBoundDeviceId() != bound_device_id_) {
    inner.setBoundDeviceId(bound_device_id_);
  }
}

Backend& ForwardingBackend::inner_of(DeviceType device) {
  Backend& backend = *inners_.at(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  adopt(backend);
  return backend;
}

void ForwardingBackend::each_inner(const std::function<void(Backend&)>& f) {
  inners_.each([&](Backend& inner) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      adopt(inner);
    }
    f(inner);
  });
}

void ForwardingBackend::note_issued(const Backend& inner, const WorkPtr& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (coalescing_ && work && !inner.supportsCoalescing()) {
    uncoalesced_.push_back(work);
  }
}

// Identity and capabilities.

const std::string ForwardingBackend::getBackendName() const {
  return inners_.at(primary_device())->getBackendName();
}

ForwardingBackend::OptionsPtr ForwardingBackend::getBackendOptions() {
  return primary().getBackendOptions();
}

void ForwardingBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  each_inner([&](Backend& inner) { inner.setGroupUid(uid); });
}

void ForwardingBackend::setTimeout(Milliseconds timeout) {
  each_inner([&](Backend& inner) { inner.setTimeout(timeout); });
}

bool ForwardingBackend::supportsSplitting() const {
  return inners_.all([](Backend& inner) { return inner.supportsSplitting(); });
}

// One inner backend is enough: see startCoalescing.
bool ForwardingBackend::supportsCoalescing() const {
  return !inners_.all([](Backend& inner) { return !inner.supportsCoalescing(); });
}

bool ForwardingBackend::supportsShrinking() const {
  return inners_.all([](Backend& inner) { return inner.supportsShrinking(); });
}

// Collectives.

WorkPtr ForwardingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return collective(device_of(tensors), &Backend::broadcast, tensors, opts);
}

WorkPtr ForwardingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return collective(device_of(tensors), &Backend::allreduce, tensors, opts);
}

WorkPtr ForwardingBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return collective(device_of(tensors), &Backend::allreduce_sparse, tensors, opts);
}

WorkPtr ForwardingBackend::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& opts) {
  return collective(device_of(tensors), &Backend::allreduce_coalesced, tensors, opts);
}

WorkPtr ForwardingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return collective(device_of(tensors), &Backend::reduce, tensors, opts);
}

WorkPtr ForwardingBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  return collective(device_of(inputs), &Backend::allgather, outputs, inputs, opts);
}

WorkPtr ForwardingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) {
  return collective(output.device().type(), &Backend::_allgather_base, output, input, opts);
}

WorkPtr ForwardingBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  return collective(device_of(inputs), &Backend::allgather_coalesced, outputs, inputs, opts);
}

WorkPtr ForwardingBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  return collective(device_of(inputs), &Backend::allgather_into_tensor_coalesced, outputs, inputs,
                    opts);
}

WorkPtr ForwardingBackend::gather(TensorLists& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& opts) {
  return collective(device_of(inputs), &Backend::gather, outputs, inputs, opts);
}

WorkPtr ForwardingBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ScatterOptions& opts) {
  return collective(device_of(outputs), &Backend::scatter, outputs, inputs, opts);
}

WorkPtr ForwardingBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                          const c10d::ReduceScatterOptions& opts) {
  return collective(device_of(outputs), &Backend::reduce_scatter, outputs, inputs, opts);
}

WorkPtr ForwardingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) {
  return collective(output.device().type(), &Backend::_reduce_scatter_base, output, input, opts);
}

WorkPtr ForwardingBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  return collective(device_of(outputs), &Backend::reduce_scatter_tensor_coalesced, outputs, inputs,
                    opts);
}

WorkPtr ForwardingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) {
  return collective(output.device().type(), &Backend::alltoall_base, output, input, output_splits,
                    input_splits, opts);
}

WorkPtr ForwardingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& opts) {
  return collective(device_of(outputs), &Backend::alltoall, outputs, inputs, opts);
}

// Barriers and sequence numbers.

WorkPtr ForwardingBackend::barrier(const c10d::BarrierOptions& opts) {
  return issue(device_of(opts), &Backend::barrier, opts);
}

// ProcessGroup asks the CPU's backend for it whatever the options say, because only Gloo has one.
void ForwardingBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const bool cpu = !opts.device && inners_.has(DeviceType::CPU);
  inner_of(cpu ? DeviceType::CPU : device_of(opts)).monitoredBarrier(opts, wait_all_ranks);
}

void ForwardingBackend::setSequenceNumberForGroup() { primary().setSequenceNumberForGroup(); }

uint64_t ForwardingBackend::getSequenceNumberForGroup() {
  return primary().getSequenceNumberForGroup();
}

// Point to point.

WorkPtr ForwardingBackend::send(Tensors& tensors, int destination, int tag) {
  return issue(device_of(tensors), &Backend::send, tensors, destination, tag);
}

WorkPtr ForwardingBackend::recv(Tensors& tensors, int source, int tag) {
  return issue(device_of(tensors), &Backend::recv, tensors, source, tag);
}

WorkPtr ForwardingBackend::recvAnysource(Tensors& tensors, int tag) {
  return issue(device_of(tensors), &Backend::recvAnysource, tensors, tag);
}

// Coalescing. ProcessGroup knows the device, but the call does not carry it. So every inner backend
// that can coalesce does. Calls on one that cannot (Gloo) run on their own. Their Works are kept,
// because the caller of batch_isend_irecv waits only for the last Work.

std::vector<BackendPtr> ForwardingBackend::coalescers() const {
  std::vector<BackendPtr> backends;
  std::copy_if(inners_.distinct().begin(), inners_.distinct().end(), std::back_inserter(backends),
               [](const auto& inner) { return inner->supportsCoalescing(); });
  if (backends.empty()) {  // the error is then the inner backend's own
    backends.push_back(inners_.at(primary_device()));
  }
  return backends;
}

void ForwardingBackend::startCoalescing() {
  for (const auto& inner : coalescers()) {
    inner->startCoalescing();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  coalescing_ = true;
  uncoalesced_.clear();
}

WorkPtr ForwardingBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    coalescing_ = false;
    works.swap(uncoalesced_);
  }
  for (const auto& inner : coalescers()) {
    if (auto work = inner->endCoalescing()) {
      works.push_back(std::move(work));
    }
  }
  if (works.size() <= 1) {
    return works.empty() ? WorkPtr() : works.front();
  }
  return c10::make_intrusive<CombinedWork>(std::move(works));
}

// Timing and completion.

void ForwardingBackend::enableCollectivesTiming() {
  each_inner([](Backend& inner) { inner.enableCollectivesTiming(); });
}

void ForwardingBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  primary().registerOnCompletionHook(std::move(hook));
  // hasHooks() is not virtual: it is true if this object has a hook. This one is never called.
  onCompletionHook_ = [](const std::shared_ptr<c10d::WorkInfo>&) {};
}

void ForwardingBackend::waitForPendingWorks() { primary().waitForPendingWorks(); }

// Connection and its end.

void ForwardingBackend::eagerConnectSingleDevice(at::Device device) {
  inner_of(device.type()).eagerConnectSingleDevice(device);
}

c10d::ErrorType ForwardingBackend::getError() { return accelerator().getError(); }

void ForwardingBackend::abort() {
  each_inner([](Backend& inner) { inner.abort(); });
}

void ForwardingBackend::shutdown() {
  each_inner([](Backend& inner) { inner.shutdown(); });
}

// Communication memory.

std::shared_ptr<c10::Allocator> ForwardingBackend::getMemAllocator() {
  return accelerator().getMemAllocator();
}

at::Tensor ForwardingBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto device = options.device_opt();
  return inner_of(device ? device->type() : accelerator_device()).allocateTensor(size, options);
}

bool ForwardingBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return accelerator().supportsTensorAlloc(device);
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "powersgd/group/inner_backends.h"
#include "powersgd/group/torch_compat.h"

namespace powersgd {

// Purpose: passes every call of a c10d backend to an inner backend, exactly: the same tensors, the
// same options and the inner backend's own Work.
//
// Contract: a call with tensors goes to the inner backend of their device. A call without tensors
// goes where its options say, else to the primary inner backend, the first of these that exists:
//   1. the bound device's;
//   2. the accelerator's, once a collective of this group has used it, because ProcessGroup drops
//      the device of a barrier on the way here;
//   3. the first of the list.
// A call that makes sense only on an accelerator (memory, windows, device ids, asynchronous errors)
// goes to the accelerator's. A call that concerns the whole group (names, timeouts, shutdown,
// coalescing) goes to every inner backend. A call for a device without an inner backend throws an
// error that names the device and the devices that have one.
//
// torch 2.15 deprecates some names (`_allgather_base`, ...). This class overrides and calls the old
// names, so both work on every release and over every inner backend. Mixing old and new names would
// recurse.
//
// Ownership: shares the inner backends with their creator. Nobody else may issue calls on them.
//
// Threads: as the inner backends allow. Most (Gloo, NCCL) allow one issuing thread at a time. The
// state that this class adds is safe from any thread.
class ForwardingBackend : public c10d::Backend {
 public:
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using Milliseconds = std::chrono::milliseconds;

  // One inner backend per device type, each of this rank and size. Two device types may share one.
  ForwardingBackend(int rank, int size, Inners inners);

  const InnerBackends& inners() const { return inners_; }

  // Identity and capabilities.
  const std::string getBackendName() const override;
  OptionsPtr getBackendOptions() override;
  void setGroupUid(const std::string& uid) override;
  void setTimeout(Milliseconds timeout) override;
  bool supportsSplitting() const override;
  bool supportsCoalescing() const override;
  bool supportsShrinking() const override;

  // Collectives.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;

  // Barriers and sequence numbers.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;

  // Point to point.
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Coalescing.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Timing and completion.
  void enableCollectivesTiming() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;

  // Connection and its end.
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Communication memory.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;

  // Child groups. Every inner backend makes its child, and a ForwardingBackend holds the children.
  // Null on a rank that is not a member.
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const OptionsPtr& options) override;
  BackendPtr merge(const StorePtr& store, const OptionsPtr& options, const int& rank,
                   const int& size) override;
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                    const OptionsPtr& options) override;

#ifdef POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif

#ifdef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
  bool supportsTimeEstimation() const override;
  void startTimeEstimate() override;
  float endTimeEstimate() override;
#endif

#ifdef POWERSGD_BACKEND_HAS_IS_INITIALIZED
  bool isInitialized() override;
#endif

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
  void addEphemeralTimeout(const Milliseconds& timeout) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) override;
#endif

#ifdef POWERSGD_BACKEND_HAS_VIRTUAL_BOUND_DEVICE
  std::optional<at::Device> getBoundDeviceId() const override;
  void setBoundDeviceId(std::optional<at::Device> device) override;
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif

#ifdef POWERSGD_BACKEND_HAS_COMPLETION_HOOKS
  bool supportsAbortHooks() const override;
  bool supportsCompletionHooks() const override;
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override;
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

 protected:
  // Releases the inner backends in a destructor. No call may follow.
  void drop_inners() { inners_.clear(); }

  // Returns the inner backends' children, which use distinct keys of `store`. A child is null if
  // this rank is not a member. Every member must call this the same number of times with one store.
  Inners split_inners(const StorePtr& store, const std::vector<int>& ranks,
                      const OptionsPtr& options);

  // Returns a part of `store` that no other call gets. It serves one child, or several on prefixes.
  StorePtr child_store(const StorePtr& store);

  // Returns one child of an inner backend that inners() does not list. No other call may use
  // `store`.
  BackendPtr split_inner(const BackendPtr& inner, const StorePtr& store,
                         const std::vector<int>& ranks, const OptionsPtr& options);

  // Returns the options for the child of `inner`: those passed to split() or merge() if they have
  // the type of the inner backend's options, else the inner backend's with the caller's name and
  // timeout. Up to torch 2.13, C++ cannot copy options, so the latter are the inner backend's live
  // ones. A class that finds better options overrides this.
  virtual OptionsPtr child_options(c10d::Backend& inner, const OptionsPtr& given);

  // Gives `inner` this group's description and bound device. Up to torch 2.13 their setters are not
  // virtual, so each inner backend gets them at its next use. A derived class calls this for
  // backends that inners() does not list.
  void adopt(c10d::Backend& inner) const;

 private:
  c10::DeviceType primary_device() const;
  c10::DeviceType accelerator_device() const;
  c10::DeviceType device_of(const Tensors& tensors) const;
  c10::DeviceType device_of(const c10d::BarrierOptions& opts) const;

  // Returns the inner backend of that device, adopted.
  c10d::Backend& inner_of(c10::DeviceType device);
  c10d::Backend& primary() { return inner_of(primary_device()); }
  c10d::Backend& accelerator() { return inner_of(accelerator_device()); }

  // Calls `f` on every inner backend, adopted.
  void each_inner(const std::function<void(c10d::Backend&)>& f);

  // Calls `method` on the inner backend of `device`, and returns its Work.
  template <typename... Params, typename... Args>
  WorkPtr issue(c10::DeviceType device, WorkPtr (c10d::Backend::*method)(Params...),
                Args&&... args) {
    c10d::Backend& inner = inner_of(device);
    WorkPtr work = (inner.*method)(std::forward<Args>(args)...);
    note_issued(inner, work);
    return work;
  }
  // The same for calls that every rank makes, so ranks agree on which backends have been used.
  template <typename... Params, typename... Args>
  WorkPtr collective(c10::DeviceType device, WorkPtr (c10d::Backend::*method)(Params...),
                     Args&&... args) {
    WorkPtr work = issue(device, method, std::forward<Args>(args)...);
    if (device != c10::DeviceType::CPU) accelerator_used_ = true;
    return work;
  }
  void note_issued(const c10d::Backend& inner, const WorkPtr& work);

  std::vector<BackendPtr> coalescers() const;
  void set_global_ranks(c10d::Backend& inner);

  InnerBackends inners_;
  std::atomic<bool> accelerator_used_{false};

  std::mutex mutex_;  // guards the members below, and adopt()
  bool coalescing_ = false;
  std::vector<WorkPtr> uncoalesced_;  // issued on inner backends that cannot coalesce
  c10::weak_intrusive_ptr<c10d::Store> child_store_;
  int64_t child_index_ = 0;  // number of earlier uses of child_store_
  std::vector<uint64_t> global_ranks_;
};

}  // namespace powersgd

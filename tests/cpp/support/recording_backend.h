// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "powersgd/group/torch_compat.h"

namespace powersgd::test {

// A backend that only records its calls and their arguments.
//
// An argument passed by reference is recorded by its address, so that equal records mean the very
// same objects. An argument passed by value is recorded by its value. Every collective returns a
// new Work, and `work` is the last of them. Other results are fixed values that no default
// implementation gives.
class RecordingBackend : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Splits = std::vector<int64_t>;
  using Milliseconds = std::chrono::milliseconds;

  struct Call {
    std::string method;
    std::vector<int64_t> arguments;
    bool operator==(const Call& other) const {
      return method == other.method && arguments == other.arguments;
    }
  };

  explicit RecordingBackend(int rank = 0, int size = 2, std::string name = "recording")
      : Backend(rank, size), name_(std::move(name)) {}

  std::vector<std::string> methods() const {
    std::vector<std::string> names;
    for (const Call& call : calls) names.push_back(call.method);
    return names;
  }

  std::vector<Call> calls;
  WorkPtr work;            // the last one returned
  bool coalesces = false;  // endCoalescing then returns a Work
  bool splits = true;
  bool fails = false;  // shutdown, abort and setTimeout then throw
  OptionsPtr options = c10::make_intrusive<Options>("recording");
  std::vector<StorePtr> stores;             // that split and merge got
  std::vector<OptionsPtr> child_options;    // that split, merge and shrink got
  BackendPtr child;                         // returned by split, merge and shrink
  static constexpr uint64_t kSequence = 7;  // getSequenceNumberForGroup

  const std::string getBackendName() const override { return name_; }
  OptionsPtr getBackendOptions() override { return options; }
  bool supportsSplitting() const override { return splits; }
  bool supportsCoalescing() const override { return coalesces; }
  bool supportsShrinking() const override { return splits; }

  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    note("setGroupUid", uid);
  }
  void setTimeout(Milliseconds timeout) override { note_or_fail("setTimeout", timeout.count()); }
  void abort() override { note_or_fail("abort"); }
  void shutdown() override { note_or_fail("shutdown"); }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return note("broadcast", t, o);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return note("allreduce", t, o);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return note("allreduce_sparse", t, o);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return note("allreduce_coalesced", t, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override { return note("reduce", t, o); }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return note("allgather", out, in, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& o) override {
    return note("_allgather_base", out, in, o);
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in,
                              const c10d::AllgatherOptions& o) override {
    return note("allgather_coalesced", out, in, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::AllgatherOptions& o) override {
    return note("allgather_into_tensor_coalesced", out, in, o);
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return note("gather", out, in, o);
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return note("scatter", out, in, o);
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in,
                         const c10d::ReduceScatterOptions& o) override {
    return note("reduce_scatter", out, in, o);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& o) override {
    return note("_reduce_scatter_base", out, in, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& o) override {
    return note("reduce_scatter_tensor_coalesced", out, in, o);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, Splits& out_splits, Splits& in_splits,
                        const c10d::AllToAllOptions& o) override {
    return note("alltoall_base", out, in, out_splits, in_splits, o);
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return note("alltoall", out, in, o);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return note("barrier", o); }
  WorkPtr send(Tensors& t, int peer, int tag) override { return note("send", t, peer, tag); }
  WorkPtr recv(Tensors& t, int peer, int tag) override { return note("recv", t, peer, tag); }
  WorkPtr recvAnysource(Tensors& t, int tag) override { return note("recvAnysource", t, tag); }

  void monitoredBarrier(const c10d::BarrierOptions& o, bool all) override {
    note("monitoredBarrier", o, all);
  }
  void setSequenceNumberForGroup() override { note("setSequenceNumberForGroup"); }
  uint64_t getSequenceNumberForGroup() override {
    note("getSequenceNumberForGroup");
    return kSequence;
  }
  void startCoalescing() override { note("startCoalescing"); }
  WorkPtr endCoalescing() override {
    auto result = note("endCoalescing");
    return coalesces ? result : WorkPtr();
  }
  void enableCollectivesTiming() override { note("enableCollectivesTiming"); }
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    note("registerOnCompletionHook", hook);
  }
  void waitForPendingWorks() override { note("waitForPendingWorks"); }
  void eagerConnectSingleDevice(at::Device device) override {
    note("eagerConnectSingleDevice", device);
  }
  c10d::ErrorType getError() override {
    note("getError");
    return c10d::ErrorType::REMOTE_ERROR;
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    note("getMemAllocator");
    return nullptr;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions /*options*/) override {
    note("allocateTensor", static_cast<int64_t>(size));
    return at::Tensor();
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    note("supportsTensorAlloc", static_cast<int64_t>(device));
    return true;
  }

  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const OptionsPtr& opts) override {
    note("split", ranks);
    return give_child(store, opts);
  }
  BackendPtr merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                   const int& size) override {
    note("merge", rank, size);
    return give_child(store, opts);
  }
  BackendPtr shrink(const std::vector<int64_t>& ranks, int flags, const OptionsPtr& opts) override {
    note("shrink", ranks, flags);
    return give_child(nullptr, opts);
  }

#ifdef POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD
  void suspend() override { note("suspend"); }
  void resume() override { note("resume"); }
  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    note("getMemoryStats");
    return {{"bytes", 3}};
  }
#endif

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
  WorkPtr gather_into_tensor(at::Tensor& out, at::Tensor& in,
                             const c10d::GatherOptions& o) override {
    return note("gather_into_tensor", out, in, o);
  }
  void addEphemeralTimeout(const Milliseconds& timeout) override {
    note("addEphemeralTimeout", timeout);
  }
#endif

#ifdef POWERSGD_BACKEND_HAS_IS_INITIALIZED
  bool isInitialized() override { return initialized; }
  bool initialized = true;
#endif

#ifdef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
  bool supportsTimeEstimation() const override { return true; }
  void startTimeEstimate() override { note("startTimeEstimate"); }
  float endTimeEstimate() override {
    note("endTimeEstimate");
    return 2.5F;
  }
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook /*hook*/) override {
    note("registerAbortHook", id);
  }
  void unregisterAbortHook(int64_t id) override { note("unregisterAbortHook", id); }
#endif

#ifdef POWERSGD_BACKEND_HAS_COMPLETION_HOOKS
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook /*hook*/) override {
    note("registerCompletionHook", id);
  }
  void unregisterCompletionHook(int64_t id) override { note("unregisterCompletionHook", id); }
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return "handle of " + name_; }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& o) override {
    note("reconfigure", o);
    rank_ = 3;
    size_ = 5;
    return WorkPtr();
  }
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& t) override {
    note("new_window", t);
    return c10::make_intrusive<c10d::Window>();
  }
#endif

 private:
  template <typename T>
  static int64_t as_argument(const T& argument) {
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<int64_t>(argument);
    } else if constexpr (std::is_same_v<T, at::Device>) {
      return static_cast<int64_t>(argument.type()) * 256 + argument.index();
    } else {
      return reinterpret_cast<int64_t>(&argument);
    }
  }
  template <typename... Args>
  WorkPtr note(const char* method, const Args&... arguments) {
    calls.push_back({method, {as_argument(arguments)...}});
    work = c10::make_intrusive<c10d::Work>();
    return work;
  }
  template <typename... Args>
  void note_or_fail(const char* method, const Args&... arguments) {
    note(method, arguments...);
    TORCH_CHECK(!fails, name_, " fails in ", method);
  }
  BackendPtr give_child(const StorePtr& store, const OptionsPtr& opts) {
    stores.push_back(store);
    child_options.push_back(opts);
    return child;
  }

  const std::string name_;
};

}  // namespace powersgd::test

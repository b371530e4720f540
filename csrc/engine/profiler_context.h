// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <optional>
#include <utility>

namespace powersgd {

// True if a profiler may show work that the calling thread begins and another thread ends. A
// profiler that has ended must not be called, and outside a backward pass the work may outlive the
// profiler.
inline bool profiler_outlasts_work() { return torch::autograd::get_current_graph_task_id() != -1; }

// The profiler that observes a thread, for the other threads that work on its behalf.
class ProfilerContext {
 public:
  // Returns the calling thread's profiler, or nothing if there is none that may show the work.
  static std::optional<ProfilerContext> current() {
    if (!profiler_outlasts_work() || !at::hasThreadLocalCallbacks()) return std::nullopt;
    return ProfilerContext(at::get_record_function_tls_(), c10::ThreadLocalDebugInfo::current());
  }

  // Lets the profiler observe the calling thread during the guard's life.
  class Guard {
   public:
    explicit Guard(const ProfilerContext& context)
        : before_(at::get_record_function_tls_()), state_(context.state_) {
      at::set_record_function_tls_(context.callbacks_);
    }
    ~Guard() { at::set_record_function_tls_(before_); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    const at::RecordFunctionTLS before_;
    const c10::DebugInfoGuard state_;
  };

 private:
  ProfilerContext(at::RecordFunctionTLS callbacks, std::shared_ptr<c10::ThreadLocalDebugInfo> state)
      : callbacks_(std::move(callbacks)), state_(std::move(state)) {}

  at::RecordFunctionTLS callbacks_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> state_;
};

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The differences between the torch releases that this project builds against (2.11 to 2.15). This
// is the only file that may ask for a version. Other files ask for a feature: by torch's own macro
// C10D_BACKEND_HAS_* where there is one, else by a macro POWERSGD_* of this file.

#include <typeinfo>

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#define POWERSGD_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Backend has suspend, resume and getMemoryStats.
#if POWERSGD_TORCH_AT_LEAST(2, 12)
#define POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD 1
#endif

#if POWERSGD_TORCH_AT_LEAST(2, 14)
// Backend has addEphemeralTimeout and gather_into_tensor, and its rank may change.
#define POWERSGD_BACKEND_HAS_LIFECYCLE 1
// Backend's getBoundDeviceId and setBoundDeviceId are virtual.
#define POWERSGD_BACKEND_HAS_VIRTUAL_BOUND_DEVICE 1
// Backend::Options has clone.
#define POWERSGD_OPTIONS_HAVE_CLONE 1
#endif

#if POWERSGD_TORCH_AT_LEAST(2, 15)
// Backend has startTimeEstimate and endTimeEstimate. Without them, Python asks only NCCL's class,
// so no other backend may claim supportsTimeEstimation.
#define POWERSGD_BACKEND_HAS_TIME_ESTIMATE 1
// Backend has isInitialized.
#define POWERSGD_BACKEND_HAS_IS_INITIALIZED 1
// Backend has hooks on completion, and says whether it has hooks. C10D_BACKEND_HAS_HOOKS covers
// only the abort hooks of 2.14.
#define POWERSGD_BACKEND_HAS_COMPLETION_HOOKS 1
#endif

namespace powersgd {

// Returns a copy of the same type where torch can make one, else the shared object itself, as
// ProcessGroup::splitGroup then does too.
inline c10::intrusive_ptr<c10d::Backend::Options> clone_or_share(
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
#ifdef POWERSGD_OPTIONS_HAVE_CLONE
  auto copy = options->clone();
  const auto& original = *options;
  const auto& cloned = *copy;
  // The copy of a subclass that does not override clone() is sliced.
  if (typeid(cloned) == typeid(original)) {
    return copy;
  }
#endif
  return options;
}

}  // namespace powersgd

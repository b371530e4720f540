// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// All that differs between the torch releases that this project builds against (2.11 to 2.15), and
// the only file that may ask for a version. The rest asks for a feature: a C10D_BACKEND_HAS_* macro
// of torch's own where there is one, else a POWERSGD_* macro of this file.

#include <typeinfo>

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#define POWERSGD_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Backend: suspend, resume, getMemoryStats.
#if POWERSGD_TORCH_AT_LEAST(2, 12)
#define POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD 1
#endif

#if POWERSGD_TORCH_AT_LEAST(2, 14)
// Backend: addEphemeralTimeout, gather_into_tensor, and a rank that may change.
#define POWERSGD_BACKEND_HAS_LIFECYCLE 1
// Backend: get and setBoundDeviceId are virtual.
#define POWERSGD_BACKEND_HAS_VIRTUAL_BOUND_DEVICE 1
// Backend::Options::clone.
#define POWERSGD_OPTIONS_HAVE_CLONE 1
#endif

#if POWERSGD_TORCH_AT_LEAST(2, 15)
// Backend: startTimeEstimate, endTimeEstimate. Before them Python asks NCCL's class alone for an
// estimate, so that no other backend may then claim supportsTimeEstimation.
#define POWERSGD_BACKEND_HAS_TIME_ESTIMATE 1
// Backend: isInitialized.
#define POWERSGD_BACKEND_HAS_IS_INITIALIZED 1
// Backend: hooks on completion, and whether there are hooks at all (C10D_BACKEND_HAS_HOOKS is of
// 2.14 and its abort hooks).
#define POWERSGD_BACKEND_HAS_COMPLETION_HOOKS 1
#endif

namespace powersgd {

// A copy of the same type where torch can make one; else the object itself, shared, as
// ProcessGroup::splitGroup then does too.
inline c10::intrusive_ptr<c10d::Backend::Options> clone_or_share(
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
#ifdef POWERSGD_OPTIONS_HAVE_CLONE
  auto copy = options->clone();
  const auto& original = *options;
  const auto& cloned = *copy;
  // A subclass that does not override clone() would come back sliced.
  if (typeid(cloned) == typeid(original)) {
    return copy;
  }
#endif
  return options;
}

}  // namespace powersgd

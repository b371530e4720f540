// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "powersgd/engine/first_error.h"

namespace powersgd {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// One inner backend per device type, in order of preference.
using Inners = std::vector<std::pair<c10::DeviceType, BackendPtr>>;

// Purpose: holds the inner backends of one group, and finds the ones that a call concerns.
//
// Contract: there is at least one, each of the group's rank and size, and one per device type. Two
// device types may share a backend.
//
// Ownership: shares the backends, until clear() releases them.
//
// Threads: immutable until clear(), after which no other call may follow.
class InnerBackends {
 public:
  // Throws if `inners` breaks the contract.
  InnerBackends(int rank, int size, Inners inners);

  const Inners& list() const { return inners_; }
  const std::vector<BackendPtr>& distinct() const { return distinct_; }  // each backend once

  // Releases them all, in a destructor.
  void clear() {
    inners_.clear();
    distinct_.clear();
  }

  bool has(c10::DeviceType device) const;
  // Throws if there is none. The error names the device and the devices that have one.
  const BackendPtr& at(c10::DeviceType device) const;

  // The first device type that is not the CPU, else the first.
  c10::DeviceType accelerator() const;

  // Calls `f` on every backend, even if it throws on one. Then rethrows the first exception.
  template <typename F>
  void each(F&& f) const {
    FirstError error;
    for (const auto& backend : distinct_) error.run([&] { f(*backend); });
    error.rethrow();
  }

  template <typename F>
  bool all(F&& f) const {
    return std::all_of(distinct_.begin(), distinct_.end(), [&](auto& inner) { return f(*inner); });
  }

  // Returns the same devices, each with child_of(backend, the backend's index in distinct()).
  template <typename F>
  Inners children(F&& child_of) const {
    std::vector<BackendPtr> made;
    for (size_t i = 0; i < distinct_.size(); ++i) {
      made.push_back(child_of(distinct_[i], i));
    }
    Inners children;
    for (const auto& [device, backend] : inners_) {
      const auto it = std::find(distinct_.begin(), distinct_.end(), backend);
      children.emplace_back(device, made[it - distinct_.begin()]);
    }
    return children;
  }

 private:
  Inners inners_;
  std::vector<BackendPtr> distinct_;
};

}  // namespace powersgd

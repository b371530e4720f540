// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/inner_backends.h"

#include <string>

namespace powersgd {
namespace {

std::vector<BackendPtr> without_repetition(const Inners& inners) {
  std::vector<BackendPtr> backends;
  for (const auto& inner : inners) {
    if (std::find(backends.begin(), backends.end(), inner.second) == backends.end()) {
      backends.push_back(inner.second);
    }
  }
  return backends;
}

}  // namespace

InnerBackends::InnerBackends(int rank, int size, Inners inners)
    : inners_(std::move(inners)), distinct_(without_repetition(inners_)) {
  TORCH_CHECK_VALUE(!inners_.empty(), "torch-powersgd needs at least one inner backend");
  for (auto it = inners_.begin(); it != inners_.end(); ++it) {
    const auto& [device, backend] = *it;
    TORCH_CHECK_VALUE(backend, "torch-powersgd: the inner backend for ", device, " is None");
    TORCH_CHECK_VALUE(backend->getRank() == rank && backend->getSize() == size,
                      "torch-powersgd: the inner backend for ", device, " is rank ",
                      backend->getRank(), " of ", backend->getSize(), ", not ", rank, " of ", size);
    const bool twice = std::any_of(inners_.begin(), it,
                                   [&](const auto& other) { return other.first == it->first; });
    TORCH_CHECK_VALUE(!twice, "torch-powersgd: two inner backends for ", device);
  }
}

bool InnerBackends::has(c10::DeviceType device) const {
  return std::any_of(inners_.begin(), inners_.end(),
                     [&](const auto& inner) { return inner.first == device; });
}

const BackendPtr& InnerBackends::at(c10::DeviceType device) const {
  std::string there_are;
  for (const auto& inner : inners_) {
    if (inner.first == device) {
      return inner.second;
    }
    there_are += there_are.empty() ? "" : ", ";
    there_are += c10::str(inner.first, " (", inner.second->getBackendName(), ")");
  }
  TORCH_CHECK(false, "torch-powersgd has no inner backend for device type ", device,
              "; this process group has ", there_are);
}

c10::DeviceType InnerBackends::accelerator() const {
  const auto found = std::find_if(inners_.begin(), inners_.end(), [](const auto& inner) {
    return inner.first != c10::DeviceType::CPU;
  });
  return (found == inners_.end() ? inners_.front() : *found).first;
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
//
// Groups that are made from a group.
#include <numeric>
#include <typeinfo>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "powersgd/group/forwarding_backend.h"

namespace powersgd {

using c10d::Backend;

namespace {

using StorePtr = ForwardingBackend::StorePtr;

StorePtr prefixed(int64_t number, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("powersgd/", number), store);
}

// Returns the backend over these children, or null if this rank is no member.
BackendPtr wrap(Inners children) {
  for (const auto& child : children) {
    if (!child.second) {
      return nullptr;
    }
  }
  const BackendPtr first = children.front().second;
  return c10::make_intrusive<ForwardingBackend>(first->getRank(), first->getSize(),
                                                std::move(children));
}

}  // namespace

// splitGroup calls split() once per device type, with one store. A backend that serves two device
// types would build its second child on the keys of the first. The calls are counted per store, so
// ranks agree on the count even if they were members of different groups before.
ForwardingBackend::StorePtr ForwardingBackend::child_store(const StorePtr& store) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool again = child_store_._unsafe_get_target() == store.get();
  child_index_ = again ? child_index_ + 1 : 0;
  child_store_ = c10::weak_intrusive_ptr<c10d::Store>(store);
  return prefixed(child_index_, store);
}

// Gloo's split reads the global rank of every member from its own options, even if they have none.
// Up to torch 2.13 it then writes the child's into the same object. If the inner backend was made
// without global ranks, it gets the ranks of this group: they are only displayed.
void ForwardingBackend::set_global_ranks(Backend& inner) {
  const OptionsPtr options = inner.getBackendOptions();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (global_ranks_.empty()) {
    global_ranks_ = options->global_ranks_in_group;
    if (global_ranks_.size() != static_cast<size_t>(getSize())) {
      global_ranks_.resize(getSize());
      std::iota(global_ranks_.begin(), global_ranks_.end(), uint64_t{0});
    }
  }
  options->global_ranks_in_group = global_ranks_;
}

ForwardingBackend::OptionsPtr ForwardingBackend::child_options(Backend& inner,
                                                               const OptionsPtr& given) {
  const OptionsPtr own = inner.getBackendOptions();
  if (given) {
    const Backend::Options& of_caller = *given;
    const Backend::Options& of_inner = *own;
    if (typeid(of_caller) == typeid(of_inner)) {
      return given;
    }
  }
  const OptionsPtr child = clone_or_share(own);
  if (given) {
    child->group_name = given->group_name;
    child->group_desc = given->group_desc;
    child->timeout = given->timeout;
  }
  return child;
}

BackendPtr ForwardingBackend::split_inner(const BackendPtr& inner, const StorePtr& store,
                                          const std::vector<int>& ranks,
                                          const OptionsPtr& options) {
  set_global_ranks(*inner);
  return inner->split(store, ranks, child_options(*inner, options));
}

Inners ForwardingBackend::split_inners(const StorePtr& store, const std::vector<int>& ranks,
                                       const OptionsPtr& options) {
  const StorePtr own = child_store(store);
  return inners_.children([&](const BackendPtr& inner, size_t i) {
    return split_inner(inner, prefixed(i, own), ranks, options);
  });
}

BackendPtr ForwardingBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                                    const OptionsPtr& options) {
  return wrap(split_inners(store, ranks, options));
}

BackendPtr ForwardingBackend::merge(const StorePtr& store, const OptionsPtr& options,
                                    const int& rank, const int& size) {
  const StorePtr own = child_store(store);
  return wrap(inners_.children([&](const BackendPtr& inner, size_t i) {
    return inner->merge(prefixed(i, own), child_options(*inner, options), rank, size);
  }));
}

BackendPtr ForwardingBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                     const OptionsPtr& options) {
  return wrap(inners_.children([&](const BackendPtr& inner, size_t) {
    return inner->shrink(ranks_to_exclude, flags,
                         options ? child_options(*inner, options) : options);
  }));
}

}  // namespace powersgd

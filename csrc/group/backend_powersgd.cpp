// SPDX-License-Identifier: BSD-3-Clause
#include "powersgd/group/backend.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

#include "group/flat_tensors.h"
#include "powersgd/engine/first_error.h"
#include "powersgd/engine/interpreter.h"
#include "powersgd/group/allreduce_taker.h"

namespace powersgd {
namespace {

Inners without_connect(const std::vector<InnerAndConnect>& inners) {
  Inners result;
  for (const InnerAndConnect& of : inners) result.emplace_back(of.device, of.inner);
  return result;
}

}  // namespace

BackendPowerSGD::BackendPowerSGD(int rank, int size, std::vector<InnerAndConnect> inners,
                                 powersgd::Options options, LogSink log, std::vector<int> hosts)
    : ForwardingBackend(rank, size, without_connect(inners)),
      session_(std::make_shared<Session>(rank, size, std::move(inners), std::move(options),
                                         std::move(log), std::move(hosts))),
      flat_tensors_(std::make_unique<FlatTensors>(session_)) {}

BackendPowerSGD::~BackendPowerSGD() {
  run_unlocked([this] {
    flat_tensors_.reset();
    session_.reset();
    drop_inners();
  });
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& opts) {
  if (session_->is_coalescing()) return ForwardingBackend::allreduce(tensors, opts);
  const auto taker = session_->taker_of(tensors);
  if (auto compressed = taker ? taker->reduce_expected(tensors.front(), opts)
                              : flat_tensors_->reduce(tensors, opts)) {
    return compressed;
  }
  return ForwardingBackend::allreduce(tensors, opts);
}

void BackendPowerSGD::startCoalescing() {
  session_->flush();
  ForwardingBackend::startCoalescing();  // Gloo refuses
  session_->begin_coalescing();
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::endCoalescing() {
  session_->end_coalescing();
  return ForwardingBackend::endCoalescing();
}

c10::intrusive_ptr<c10d::Backend::Options> BackendPowerSGD::getBackendOptions() {
  const auto timeout = ForwardingBackend::getBackendOptions()->timeout;
  return c10::make_intrusive<BackendOptions>(session_->options(), timeout);
}

c10::intrusive_ptr<c10d::Backend> BackendPowerSGD::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  Inners inners = split_inners(store, ranks, opts);
  const auto engine_store = child_store(store);
  const std::vector<InnerAndConnect>& own = session_->inners();
  std::vector<InnerAndConnect> children;
  for (size_t i = 0; i < own.size(); ++i) {
    children.push_back({own[i].device, inners[i].second, own[i].connect,
                        c10::make_intrusive<c10d::PrefixStore>(std::to_string(i), engine_store)});
  }
  const BackendPtr& first = children.front().inner;
  if (!first) return nullptr;
  const std::vector<int>& host_of = session_->hosts();
  std::vector<int> hosts;
  for (const int rank : ranks) {
    if (!host_of.empty()) hosts.push_back(host_of.at(static_cast<size_t>(rank)));
  }
  const auto* given = dynamic_cast<const BackendOptions*>(opts.get());
  auto child = c10::make_intrusive<BackendPowerSGD>(
      first->getRank(), first->getSize(), std::move(children),
      given ? given->compression : session_->options(), session_->log_sink(), std::move(hosts));
  if (opts) child->session()->set_timeout(opts->timeout);
  return child;
}

void BackendPowerSGD::setTimeout(std::chrono::milliseconds timeout) {
  ForwardingBackend::setTimeout(timeout);
  session_->set_timeout(timeout);
}

#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
void BackendPowerSGD::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  ForwardingBackend::addEphemeralTimeout(timeout);
  session_->for_each_connected(
      [&](c10d::Backend& backend) { backend.addEphemeralTimeout(timeout); });
}
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
namespace {

constexpr const char* kCannotReconfigure =
    "powersgd: the group cannot be reconfigured, because new ranks would lack the factors that all "
    "ranks share. Save Compression.state_dict(), create a new group, and load the state there";

}  // namespace

c10d::ReconfigureHandle BackendPowerSGD::get_reconfigure_handle() const {
  TORCH_CHECK(false, kCannotReconfigure);
}

c10::intrusive_ptr<c10d::Work> BackendPowerSGD::reconfigure(const c10d::ReconfigureOptions&) {
  TORCH_CHECK(false, kCannotReconfigure);
}
#endif

void BackendPowerSGD::shutdown() {
  ended_ = true;
  FirstError error;
  error.run([&] { session_->shutdown(); });
  error.run([&] { ForwardingBackend::shutdown(); });
  error.rethrow();
}

void BackendPowerSGD::abort() {
  ended_ = true;
  FirstError error;
  error.run([&] { session_->abort(); });
  error.run([&] { ForwardingBackend::abort(); });
  error.rethrow();
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#include "simt/races.h"

#include <cstdio>

#if defined(POWERSGD_CHECK_RACES)
#include <sanitizer/tsan_interface.h>

namespace __tsan {
// The program need not fail as well where races are reported: the test does, as its launch throws.
bool OnFinalize(bool) { return false; }
}  // namespace __tsan

extern "C" int __tsan_atomic32_load(const volatile int* address, int order);
extern "C" int __tsan_atomic32_fetch_or(volatile int* address, int value, int order);
#endif

namespace simt::races {

#if defined(POWERSGD_CHECK_RACES)
namespace {

int64_t global_reports = 0;

}  // namespace

// An address is another object in another launch. The history of hundreds of threads takes memory.
extern "C" const char* __tsan_default_options() {
  return "suppress_equal_addresses=0:history_size=0";
}
extern "C" void __tsan_on_report(void*) { ++global_reports; }
int64_t report_count() { return global_reports; }

// The compiler calls these before accesses to volatile variables. They are atomic, as on a GPU.
extern "C" void __tsan_volatile_read4(int* address) {
  __tsan_atomic32_load(address, __ATOMIC_RELAXED);
}
extern "C" void __tsan_volatile_write4(int* address) {
  __tsan_atomic32_fetch_or(address, 0, __ATOMIC_RELAXED);
}

Actor create_actor() { return __tsan_create_fiber(0); }
void destroy_actor(Actor actor) { __tsan_destroy_fiber(actor); }
Actor running_actor() { return __tsan_get_current_fiber(); }
void switch_to(Actor actor) { __tsan_switch_to_fiber(actor, __tsan_switch_to_fiber_no_sync); }
void name_actor(Actor actor, unsigned block, unsigned thread) {
  char name[64];
  std::snprintf(name, sizeof name, "block %u, thread %u", block, thread);
  __tsan_set_fiber_name(actor, name);
}

void Points::add_here() { __tsan_release(address_.get()); }
void Points::continue_after() const { __tsan_acquire(address_.get()); }
#else
int64_t report_count() { return 0; }

Actor create_actor() { return nullptr; }
void destroy_actor(Actor) {}
Actor running_actor() { return nullptr; }
void switch_to(Actor) {}
void name_actor(Actor, unsigned, unsigned) {}

void Points::add_here() {}
void Points::continue_after() const {}
#endif

void synchronize(const std::vector<Actor>& actors) {
  if (!kChecked) return;
  const Actor caller = running_actor();
  Points points;
  for (const Actor actor : actors) {
    switch_to(actor);
    points.add_here();
  }
  for (const Actor actor : actors) {
    switch_to(actor);
    points.continue_after();
  }
  switch_to(caller);
}

void Fences::fence(Actor thread, const Releases& releases) {
  for (const auto& [address, seen] : seen_) acquire_seen(thread, releases, address);
  last_fence_ = std::make_shared<Points>();
  const Actor host = running_actor();
  switch_to(thread);
  last_fence_->add_here();
  switch_to(host);
}

void Fences::read_atomic(const Releases& releases, const void* address) {
  const auto found = releases.find(address);
  if (found != releases.end()) seen_[address].read = found->second.size();
}

void Fences::write_atomic(Releases& releases, const void* address) {
  if (last_fence_) releases[address].push_back(last_fence_);
}

void Fences::acquire(Actor thread, const Releases& releases, const void* address) {
  read_atomic(releases, address);
  acquire_seen(thread, releases, address);
}

void Fences::acquire_seen(Actor thread, const Releases& releases, const void* address) {
  const auto seen = seen_.find(address);
  if (seen == seen_.end()) return;
  const auto& points = releases.at(address);
  const Actor host = running_actor();
  switch_to(thread);
  for (size_t& i = seen->second.acquired; i < seen->second.read; ++i) points[i]->continue_after();
  switch_to(host);
}

}  // namespace simt::races

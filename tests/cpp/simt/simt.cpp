// SPDX-License-Identifier: BSD-3-Clause
#include "simt/simt.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "simt/grid.h"

namespace simt {
namespace {

uint64_t global_seed = 1;
int64_t global_launches = 0;
int64_t global_copied_bytes = 0;

Thread& running() {
  if (current == nullptr) throw std::runtime_error("simt: device code called outside a launch");
  return *current;
}

}  // namespace

void set_seed(uint64_t seed) { global_seed = seed; }
int64_t launch_count() { return global_launches; }
int64_t async_copied_bytes() { return global_copied_bytes; }

void launch(const LaunchShape& shape, const std::function<void()>& thread_body) {
  if (shape.threads < 1 || shape.threads > 1024 || shape.blocks < 1)
    throw std::runtime_error("simt: bad launch shape");
  const int64_t reports = races::report_count();
  try {
    Grid local(shape, thread_body, global_seed + static_cast<uint64_t>(++global_launches));
    grid = &local;
    local.run();
  } catch (...) {
    grid = nullptr;
    fiber_pool().clear();  // stacks of fibers that never ended; their frames own nothing
    throw;
  }
  grid = nullptr;
  if (races::report_count() != reports)
    throw std::runtime_error("simt: ThreadSanitizer reports a race");
}

Dim3 thread_index() { return running().index; }
Dim3 block_index() { return running().block->index; }
Dim3 block_size() { return grid->block_dim; }
unsigned char* shared_memory() { return running().block->shared.get(); }

void yield() { grid->switch_to_scheduler(running(), false); }

int sync_block(int predicate) {
  Thread& thread = running();
  thread.predicate = predicate;
  thread.state = State::kAtBarrier;
  grid->switch_to_scheduler(thread, false);
  return thread.block->barrier_result;
}

uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int operand) {
  Thread& thread = running();
  if ((mask >> (thread.index.x % kWarp) & 1) == 0)
    throw std::runtime_error("simt: a lane calls a warp operation that excludes it");
  thread.op = op;
  thread.mask = mask;
  thread.value = value;
  thread.operand = operand;
  thread.state = State::kAtWarpOp;
  grid->switch_to_scheduler(thread, false);
  return thread.result;
}

// The host allocates what the runtime needs for a thread, see races.h.
template <typename Action>
void as_host(const Action& action) {
  Thread& thread = running();
  races::switch_to(grid->host);
  action(thread.fences, thread.fiber->actor);
  races::switch_to(thread.fiber->actor);
}

void fence() {
  if (!races::kChecked) return;
  as_host([](races::Fences& fences, races::Actor self) { fences.fence(self, grid->releases); });
}

void order_update(const void* address) {
  if (!races::kChecked) return;
  as_host([&](races::Fences& fences, races::Actor) {
    fences.read_atomic(grid->releases, address);
    fences.write_atomic(grid->releases, address);
  });
}

void order_acquire(const void* address) {
  if (!races::kChecked) return;
  as_host([&](races::Fences& fences, races::Actor self) {
    fences.acquire(self, grid->releases, address);
  });
}

void copy_async(void* to, const void* from, size_t bytes) {
  Thread& thread = running();
  std::memset(to, 0xFF, bytes);  // floats read as NaN
  thread.copies.push_back({to, from, bytes, thread.committed_groups});
}

void commit_copies() { ++running().committed_groups; }

void await_copies(size_t groups_left) {
  Thread& thread = running();
  const auto due = [&](const AsyncCopy& copy) {
    return copy.group + groups_left < thread.committed_groups;
  };
  const auto end = std::find_if_not(thread.copies.begin(), thread.copies.end(), due);
  for (auto copy = thread.copies.begin(); copy != end; ++copy) {
    std::memcpy(copy->to, copy->from, copy->bytes);
    global_copied_bytes += static_cast<int64_t>(copy->bytes);
  }
  thread.copies.erase(thread.copies.begin(), end);
}

}  // namespace simt

// SPDX-License-Identifier: BSD-3-Clause
#include "support/simt/simt.h"

#include <stdexcept>

#include "support/simt/grid.h"

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
void count_async_copy(size_t bytes) { global_copied_bytes += static_cast<int64_t>(bytes); }

void launch(const LaunchShape& shape, const std::function<void()>& thread_body) {
  if (shape.threads < 1 || shape.threads > 1024 || shape.blocks < 1)
    throw std::runtime_error("simt: bad launch shape");
  Grid local(shape, thread_body, global_seed + static_cast<uint64_t>(++global_launches));
  grid = &local;
  try {
    local.run();
  } catch (...) {
    grid = nullptr;
    fiber_pool().clear();  // stacks of fibers that never ended; their frames own nothing
    throw;
  }
  grid = nullptr;
}

const Dim3& thread_index() { return running().index; }
const Dim3& block_index() { return running().block->index; }
const Dim3& block_size() { return grid->block_dim; }
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

}  // namespace simt

// SPDX-License-Identifier: BSD-3-Clause
#include "simt/grid.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

Grid* grid = nullptr;
Thread* current = nullptr;

std::vector<std::unique_ptr<Fiber>>& fiber_pool() {
  static std::vector<std::unique_ptr<Fiber>> pool;
  return pool;
}

namespace {

context::fcontext_t scheduler_context = nullptr;

void enter_fiber(context::transfer_t transfer) {
  scheduler_context = transfer.fctx;
  Thread& thread = *static_cast<Thread*>(transfer.data);
  grid->run_body(thread);
  grid->switch_to_scheduler(thread, true);
  std::abort();  // an ended fiber is never resumed
}

uint64_t warp_result(const std::vector<Thread>& threads, int first, int lane, int size) {
  const Thread& self = threads[static_cast<size_t>(first + lane)];
  if (self.op == WarpOp::kSync) return 0;
  const int source = self.op == WarpOp::kShuffle ? self.operand : lane ^ self.operand;
  if (source < 0 || source >= size || (self.mask >> source & 1) == 0) {
    throw std::runtime_error("simt: a shuffle reads lane " + std::to_string(source) +
                             ", which does not take part");
  }
  return threads[static_cast<size_t>(first + source)].value;
}

}  // namespace

Grid::Grid(const LaunchShape& shape, const std::function<void()>& body, uint64_t seed)
    : shape_(shape), body_(body), random_(seed) {
  block_dim.x = static_cast<unsigned>(shape.threads);
  auto& pool = fiber_pool();
  const size_t needed = static_cast<size_t>(shape.threads) *
                        static_cast<size_t>(std::min<int64_t>(shape.blocks, kBlocksAtOnce));
  while (pool.size() < needed) pool.push_back(std::make_unique<Fiber>());
  for (auto& fiber : pool) free_fibers_.push_back(fiber.get());
}

// The host waits for all threads here, and not before: a block that starts would come after those
// that have ended.
Grid::~Grid() {
  if (!races::kChecked) return;
  races::Points ends;
  for (const auto& fiber : fiber_pool()) {
    races::switch_to(fiber->actor);
    ends.add_here();
  }
  races::switch_to(host);
  ends.continue_after();
}

Block& Grid::start_block(int64_t index) {
  auto block = std::make_unique<Block>();
  block->index = {static_cast<unsigned>(index), 0, 0};
  block->shared.reset(new unsigned char[shape_.shared_bytes]);
  std::fill_n(block->shared.get(), shape_.shared_bytes, 0xFF);  // floats read as NaN
  block->threads.resize(static_cast<size_t>(shape_.threads));
  races::Points start;
  start.add_here();
  for (int i = 0; i < shape_.threads; ++i) {
    Thread& thread = block->threads[static_cast<size_t>(i)];
    thread.block = block.get();
    thread.index = {static_cast<unsigned>(i), 0, 0};
    thread.fiber = free_fibers_.back();
    free_fibers_.pop_back();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(thread.fiber->stack.get(), kStackBytes);
#endif
    thread.fiber->fake_stack = nullptr;
    thread.fiber->context =
        context::make_fcontext(thread.fiber->stack.get() + kStackBytes, kStackBytes, enter_fiber);
    races::name_actor(thread.fiber->actor, block->index.x, thread.index.x);
    races::switch_to(thread.fiber->actor);
    start.continue_after();
    races::switch_to(host);
  }
  live_.push_back(std::move(block));
  return *live_.back();
}

void Grid::run() {
  std::vector<int64_t> order(static_cast<size_t>(shape_.blocks));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::shuffle(order.begin(), order.end(), random_);
  size_t next = 0;
  while (next < order.size() || !live_.empty()) {
    while (next < order.size() && live_.size() < kBlocksAtOnce) start_block(order[next++]);
    const size_t pick = random_() % live_.size();
    Block& block = *live_[pick];
    step(block);
    const bool ended = std::all_of(block.threads.begin(), block.threads.end(),
                                   [](const Thread& t) { return t.state == State::kEnded; });
    if (!ended) continue;
    for (Thread& thread : block.threads) free_fibers_.push_back(thread.fiber);
    if (races::kChecked) ended_.push_back(std::move(live_[pick]));
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(pick));
  }
}

// Runs every ready thread to its next wait, warps in a random order, then ends the waits that are
// complete: one barrier at most, so that another block can run in between.
void Grid::step(Block& block) {
  const int threads = shape_.threads;
  const int warps = (threads + kWarp - 1) / kWarp;
  std::vector<int> order(static_cast<size_t>(warps));
  for (int i = 0; i < warps; ++i) order[static_cast<size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), random_);
  const bool backwards = (random_() & 1) != 0;
  bool progress = false;
  for (const int warp : order) {
    const int first = warp * kWarp;
    const int last = std::min(first + kWarp, threads);
    bool more = true;
    while (more) {
      for (int i = 0; i < last - first; ++i) {
        const int lane = backwards ? last - 1 - i : first + i;
        Thread& thread = block.threads[static_cast<size_t>(lane)];
        if (thread.state != State::kReady) continue;
        switch_to_thread(thread);
        progress = true;
        if (error_) std::rethrow_exception(error_);
      }
      more = finish_warp_ops(block, first, last);
      progress = progress || more;
    }
  }
  if (finish_barrier(block)) return;
  const bool ended = std::all_of(block.threads.begin(), block.threads.end(),
                                 [](const Thread& t) { return t.state == State::kEnded; });
  if (!progress && !ended) report_stuck(block);
}

bool Grid::finish_barrier(Block& block) {
  int sum = 0;
  for (const Thread& thread : block.threads) {
    if (thread.state != State::kAtBarrier) return false;
    sum += thread.predicate != 0;
  }
  block.barrier_result = sum;
  for (Thread& thread : block.threads) thread.state = State::kReady;
  synchronize(block, 0, shape_.threads, ~0u);
  return true;
}

// A warp operation ends when all lanes of its mask wait at it.
bool Grid::finish_warp_ops(Block& block, int first, int last) {
  bool any = false;
  for (int lane = 0; lane < last - first; ++lane) {
    const Thread& leader = block.threads[static_cast<size_t>(first + lane)];
    if (leader.state != State::kAtWarpOp) continue;
    const unsigned mask = leader.mask;
    bool complete = true;
    for (int i = 0; i < kWarp; ++i) {
      if ((mask >> i & 1) == 0) continue;
      if (first + i >= last || block.threads[static_cast<size_t>(first + i)].state == State::kEnded)
        throw std::runtime_error("simt: block " + std::to_string(block.index.x) +
                                 ": a warp operation includes lane " + std::to_string(i) +
                                 " of warp " + std::to_string(first / kWarp) +
                                 ", which has ended or does not exist");
      const Thread& other = block.threads[static_cast<size_t>(first + i)];
      complete = complete && other.state == State::kAtWarpOp && other.mask == mask &&
                 other.op == leader.op;
    }
    if (!complete) continue;
    for (int i = 0; i < last - first; ++i) {
      if (mask >> i & 1)
        block.threads[static_cast<size_t>(first + i)].result =
            warp_result(block.threads, first, i, last - first);
    }
    for (int i = 0; i < last - first; ++i) {
      if (mask >> i & 1) block.threads[static_cast<size_t>(first + i)].state = State::kReady;
    }
    if (leader.op == WarpOp::kSync) synchronize(block, first, last, mask);
    any = true;
  }
  return any;
}

// Orders the accesses of threads [first, last) of a block, as far as the mask has their lane.
void Grid::synchronize(const Block& block, int first, int last, unsigned mask) {
  if (!races::kChecked) return;
  std::vector<races::Actor> actors;
  for (int i = first; i < last; ++i) {
    if (mask >> (i % kWarp) & 1)
      actors.push_back(block.threads[static_cast<size_t>(i)].fiber->actor);
  }
  races::synchronize(actors);
}

void Grid::report_stuck(const Block& block) const {
  int counts[4] = {0, 0, 0, 0};
  for (const Thread& thread : block.threads) ++counts[static_cast<int>(thread.state)];
  throw std::runtime_error("simt: block " + std::to_string(block.index.x) + " is stuck: of " +
                           std::to_string(shape_.threads) + " threads " +
                           std::to_string(counts[1]) + " wait at __syncthreads, " +
                           std::to_string(counts[2]) + " at a warp operation, and " +
                           std::to_string(counts[3]) + " have ended");
}

void Grid::switch_to_thread(Thread& thread) {
  current = &thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, thread.fiber->stack.get(), kStackBytes);
#endif
  races::switch_to(thread.fiber->actor);
  const context::transfer_t transfer = context::jump_fcontext(thread.fiber->context, &thread);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
  thread.fiber->context = transfer.fctx;
  current = nullptr;
}

void Grid::switch_to_scheduler(Thread& thread, bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ends ? nullptr : &thread.fiber->fake_stack, scheduler_stack_,
                                 scheduler_stack_bytes_);
#else
  static_cast<void>(ends);
#endif
  races::switch_to(host);
  scheduler_context = context::jump_fcontext(scheduler_context, nullptr).fctx;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(thread.fiber->fake_stack, &scheduler_stack_,
                                  &scheduler_stack_bytes_);
#else
  static_cast<void>(thread);
#endif
}

void Grid::run_body(Thread& thread) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
  try {
    body_();
    if (!thread.copies.empty())
      throw std::runtime_error("simt: a thread ends, and has not waited for an asynchronous copy");
  } catch (...) {
    error_ = std::current_exception();
  }
  thread.state = State::kEnded;
}

}  // namespace simt

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "simt/races.h"
#include "simt/simt.h"

// The scheduler has one fiber per CUDA thread, on Boost.Context's bare context switch. A fiber runs
// until it waits for other threads. The scheduler then resumes fibers whose wait is over.

namespace simt {

namespace context = boost::context::detail;

constexpr int kWarp = 32;
constexpr int kBlocksAtOnce = 3;
constexpr size_t kStackBytes = 128 * 1024;

enum class State { kReady, kAtBarrier, kAtWarpOp, kEnded };

struct Fiber {
  Fiber() = default;
  ~Fiber() { races::destroy_actor(actor); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  context::fcontext_t context = nullptr;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  void* fake_stack = nullptr;
  const races::Actor actor = races::create_actor();
};

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
  size_t group;
};

struct Block;

struct Thread {
  Block* block = nullptr;
  Fiber* fiber = nullptr;
  Dim3 index;
  State state = State::kReady;
  int predicate = 0;
  WarpOp op = WarpOp::kSync;
  unsigned mask = 0;
  int operand = 0;
  uint64_t value = 0;
  uint64_t result = 0;
  races::Fences fences;
  std::vector<AsyncCopy> copies;  // not yet made
  size_t committed_groups = 0;
};

struct Block {
  Dim3 index;
  std::vector<Thread> threads;
  std::unique_ptr<unsigned char[]> shared;
  int barrier_result = 0;
};

class Grid {
 public:
  Grid(const LaunchShape& shape, const std::function<void()>& body, uint64_t seed);
  ~Grid();
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  void run();
  void switch_to_scheduler(Thread& thread, bool ends);
  void run_body(Thread& thread);

  Dim3 block_dim;
  const races::Actor host = races::running_actor();
  races::Releases releases;

 private:
  Block& start_block(int64_t index);
  void step(Block& block);
  bool finish_barrier(Block& block);
  bool finish_warp_ops(Block& block, int first, int last);
  void synchronize(const Block& block, int first, int last, unsigned mask);
  void switch_to_thread(Thread& thread);
  [[noreturn]] void report_stuck(const Block& block) const;

  const LaunchShape shape_;
  const std::function<void()>& body_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Block>> live_;
  std::vector<std::unique_ptr<Block>> ended_;  // kept to the end where races are checked
  std::vector<Fiber*> free_fibers_;
  std::exception_ptr error_;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
};

// The launch and the thread that run now, or null. There is one of each at a time.
extern Grid* grid;
extern Thread* current;

// Fibers are kept between launches, which would otherwise spend most of their time on stacks.
std::vector<std::unique_ptr<Fiber>>& fiber_pool();

}  // namespace simt

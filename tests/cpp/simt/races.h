// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

// ThreadSanitizer learns here which CUDA thread of a launch runs, and what orders the threads'
// accesses to memory. Without ThreadSanitizer, nothing here has an effect.
//
// As on a GPU, these order accesses:
//   - The start and the end of a launch.
//   - __syncthreads() those of a block, and __syncwarp() those of the lanes of its mask.
//   - __threadfence() and then an atomic operation what came before, for a thread whose later
//     operation on the same address is followed by __threadfence(), or is a load that acquires.
// A shuffle, or an atomic operation without fences, orders nothing.
//
// ThreadSanitizer takes the CUDA threads that run on the same fiber for one. Races of a block with
// those that were on its fibers before it go unnoticed, but blocks run in a random order.

namespace simt::races {

#if defined(POWERSGD_CHECK_RACES)
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

using Actor = void*;  // a CUDA thread, or the thread of the host that launches

Actor create_actor();
void destroy_actor(Actor actor);
void name_actor(Actor actor, unsigned block, unsigned thread);
Actor running_actor();
void switch_to(Actor actor);  // orders nothing
int64_t report_count();       // since the program began

// A set of points in the execution of actors.
class Points {
 public:
  void add_here();              // the point where the running actor is
  void continue_after() const;  // what the running actor does next comes after the points

 private:
  std::unique_ptr<char> address_{new char};
};

// Each of the actors waits for all others.
void synchronize(const std::vector<Actor>& actors);

// The fences that atomic operations on an address have made known, in the order of these.
using Releases = std::map<const void*, std::vector<std::shared_ptr<Points>>>;

// The fences and atomic operations of one CUDA thread. The host calls these functions in its stead,
// because what they allocate is freed by the host.
class Fences {
 public:
  void fence(Actor thread, const Releases& releases);
  void read_atomic(const Releases& releases, const void* address);
  void write_atomic(Releases& releases, const void* address);
  void acquire(Actor thread, const Releases& releases, const void* address);

 private:
  struct Seen {
    size_t read = 0, acquired = 0;  // how many of the releases
  };
  void acquire_seen(Actor thread, const Releases& releases, const void* address);

  std::map<const void*, Seen> seen_;
  std::shared_ptr<Points> last_fence_;
};

}  // namespace simt::races

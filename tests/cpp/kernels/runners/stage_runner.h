// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <ostream>
#include <string>
#include <vector>

#include "powersgd/kernels/kernels.h"
#include "powersgd/kernels/packets.h"

namespace powersgd::test {

// The runners have tables of the stages in this order.
enum class Stage { kRandomStart, kProject, kOrthogonalize, kBackProject, kReconstruct };
enum class PacketStage { kQuantize, kRequantize, kDequantize };

// Runs the stages of one implementation on its device. The tests of tests/cpp/kernels are written
// against this interface, so that one text tests every implementation. A test program links one
// file that defines stage_runners().
class StageRunner {
 public:
  virtual ~StageRunner() = default;

  // Returns memory of the device, 64-byte aligned, with arbitrary contents. The runner frees it at
  // its end.
  virtual void* allocate(size_t bytes) = 0;
  // Copies come after all stages before them, and have ended when these return.
  virtual void copy_in(void* device, const void* host, size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, size_t bytes) = 0;

  virtual kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                        const std::vector<kernels::RawSegment>& raw) = 0;

  // See Stages::multiplies.
  virtual bool multiplies(const kernels::Bucket&) { return true; }

  // They may return before the stage has ended. Stages run one after the other, as on a stream. All
  // pointers are device memory.
  virtual void run(Stage stage, const kernels::Bucket& bucket) = 0;
  virtual void run(PacketStage stage, const kernels::Packets& packets) = 0;
};

// A runner whose device memory is the host's.
class HostMemoryRunner : public StageRunner {
 public:
  // Each block has exactly its size, so that AddressSanitizer sees every step beyond it.
  void* allocate(size_t bytes) override {
    void* block = nullptr;
    if (posix_memalign(&block, 64, bytes) != 0) throw std::bad_alloc();
    blocks_.emplace_back(block, &std::free);
    std::memset(block, 0xA5, bytes);
    return block;
  }
  void copy_in(void* device, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void copy_out(void* host, const void* device, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }

 private:
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
};

struct RunnerFactory {
  std::string name;  // letters, digits and underscores
  std::function<std::unique_ptr<StageRunner>()> make;
};

inline std::ostream& operator<<(std::ostream& stream, const RunnerFactory& factory) {
  return stream << factory.name;
}

// Returns the runners of this program. On a CPU the one that the CPU would choose comes last.
std::vector<RunnerFactory> stage_runners();
bool run_cpu_kernels();  // true if they run the CPU's kernels
// False if their code is for GPUs before Ampere, which round no operands of a product to bfloat16.
bool have_bfloat16_products();

// Groups of runners that must agree bit for bit on every stage, and a group that must agree on
// orthogonalize and reconstruct.
std::vector<std::vector<RunnerFactory>> runners_equal_in_all_stages();
std::vector<RunnerFactory> runners_equal_in_shared_stages();

}  // namespace powersgd::test

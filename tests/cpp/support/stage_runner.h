// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "powersgd/kernels.h"

namespace powersgd::test {

enum class Stage { kRandomStart, kProject, kOrthogonalize, kBackProject, kReconstruct };

// Where the stages run. The tests of tests/cpp/kernels are written against this interface, so that
// one text tests every implementation: a test program links the one file that defines
// stage_runners().
class StageRunner {
 public:
  virtual ~StageRunner() = default;

  // Memory of the device, 64-byte aligned, with arbitrary contents. The runner frees it at its end.
  virtual void* allocate(size_t bytes) = 0;
  virtual void copy_in(void* device, const void* host, size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, size_t bytes) = 0;

  virtual kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                        const std::vector<kernels::RawSegment>& raw,
                                        DType factor_dtype) = 0;

  // Returns when the stage has ended. All pointers in `bucket` are device memory.
  virtual void run(Stage stage, const kernels::Bucket& bucket) = 0;
};

struct RunnerFactory {
  std::string name;  // letters, digits and underscores
  std::function<std::unique_ptr<StageRunner>()> make;
};

inline std::ostream& operator<<(std::ostream& stream, const RunnerFactory& factory) {
  return stream << factory.name;
}

// What the tests are run on.
std::vector<RunnerFactory> stage_runners();

// Groups of runners that must agree bit for bit: on every stage, and on orthogonalize and
// reconstruct.
std::vector<std::vector<RunnerFactory>> runners_equal_in_all_stages();
std::vector<RunnerFactory> runners_equal_in_shared_stages();

}  // namespace powersgd::test

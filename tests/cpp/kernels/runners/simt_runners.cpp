// SPDX-License-Identifier: BSD-3-Clause
#include <memory>
#include <stdexcept>

#include "kernels/runners/cuda_launchers.h"
#include "simt/simt.h"

namespace powersgd::test {
namespace {

// The CUDA kernels on the SIMT runtime. `seed` decides the order of blocks and threads.
class SimtRunner : public HostMemoryRunner {
 public:
  explicit SimtRunner(uint64_t seed) : seed_(seed) {}

  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw) override {
    return kernels::cuda::make_tiles(matrices, raw);
  }

  bool multiplies(const kernels::Bucket& bucket) override {
    return kernels::cuda::multiplies(bucket.largest_rank);
  }
  void run(Stage stage, const kernels::Bucket& bucket) override { run_kernel(stage, bucket); }
  void run(PacketStage stage, const kernels::Packets& packets) override {
    run_kernel(stage, packets);
  }

 private:
  template <class AnyStage, class Input>
  void run_kernel(AnyStage stage, const Input& input) const {
    simt::set_seed(seed_);
    if (launch(stage, input, nullptr) != 0) throw std::runtime_error("a launch failed");
  }

  const uint64_t seed_;
};

RunnerFactory simt_runner(uint64_t seed) {
  return {"simt_seed_" + std::to_string(seed), [=] { return std::make_unique<SimtRunner>(seed); }};
}

}  // namespace

std::vector<RunnerFactory> stage_runners() { return {simt_runner(1)}; }

bool run_cpu_kernels() { return false; }
bool have_bfloat16_products() { return true; }

// The order of blocks and threads must not matter.
std::vector<std::vector<RunnerFactory>> runners_equal_in_all_stages() {
  return {{simt_runner(1), simt_runner(2)}};
}

std::vector<RunnerFactory> runners_equal_in_shared_stages() {
  return {simt_runner(1), simt_runner(3)};
}

}  // namespace powersgd::test

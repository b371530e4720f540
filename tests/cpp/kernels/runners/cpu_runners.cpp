// SPDX-License-Identifier: BSD-3-Clause
#include <array>
#include <thread>

#include "kernels/cpu/targets/stage_table.h"
#include "kernels/runners/stage_runner.h"

namespace powersgd::test {
namespace {

using kernels::cpu::Isa;

// Every instruction set of this machine, and a number of threads.
class CpuRunner : public HostMemoryRunner {
 public:
  CpuRunner(Isa isa, int threads) : isa_(isa), threads_(threads) {}

  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw) override {
    return kernels::cpu::make_tiles(matrices, raw);
  }

  void run(Stage stage, const kernels::Bucket& bucket) override {
    const kernels::cpu::StageFunctions& on_isa = kernels::cpu::stages_on(isa_);
    const std::array stages{&kernels::cpu::random_start, on_isa.project, on_isa.orthogonalize,
                            on_isa.back_project, on_isa.reconstruct};
    stages[static_cast<size_t>(stage)](bucket, on_threads());
  }

  void run(PacketStage stage, const kernels::Packets& packets) override {
    const kernels::cpu::PacketFunctions& on_isa = kernels::cpu::packets_on(isa_);
    const std::array stages{on_isa.quantize, on_isa.requantize, on_isa.dequantize};
    stages[static_cast<size_t>(stage)](packets, on_threads());
  }

 private:
  kernels::cpu::ParallelFor on_threads() const {
    return [this](int64_t count, const auto& body) { run_parallel(count, body); };
  }

  void run_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) const {
    std::vector<std::thread> threads;
    for (int i = 1; i < threads_; ++i) {
      threads.emplace_back(body, count * i / threads_, count * (i + 1) / threads_);
    }
    body(0, count / threads_);
    for (std::thread& thread : threads) thread.join();
  }

  const Isa isa_;
  const int threads_;
};

RunnerFactory cpu_runner(const std::string& name, Isa isa, int threads) {
  return {name, [=] { return std::make_unique<CpuRunner>(isa, threads); }};
}

std::vector<std::pair<std::string, Isa>> supported_isas() {
  std::vector<std::pair<std::string, Isa>> supported;
  for (const auto& [name, isa] :
       {std::pair{"cpu_baseline", Isa::kBaseline}, std::pair{"cpu_avx2", Isa::kAvx2},
        std::pair{"cpu_avx512", Isa::kAvx512}}) {
    if (kernels::cpu::is_supported(isa)) supported.emplace_back(name, isa);
  }
  return supported;
}

}  // namespace

std::vector<RunnerFactory> stage_runners() {
  std::vector<RunnerFactory> runners;
  for (const auto& [name, isa] : supported_isas()) runners.push_back(cpu_runner(name, isa, 1));
  return runners;
}

bool run_cpu_kernels() { return true; }
bool have_bfloat16_products() { return false; }

std::vector<std::vector<RunnerFactory>> runners_equal_in_all_stages() {
  std::vector<std::vector<RunnerFactory>> groups;
  for (const auto& [name, isa] : supported_isas()) {
    std::vector<RunnerFactory> group;
    for (const int threads : {1, 2, 3, 7}) {
      group.push_back(cpu_runner(name + "_" + std::to_string(threads) + "_threads", isa, threads));
    }
    groups.push_back(group);
  }
  return groups;
}

std::vector<RunnerFactory> runners_equal_in_shared_stages() { return stage_runners(); }

}  // namespace powersgd::test

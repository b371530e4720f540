// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "kernels/runners/cuda_launchers.h"

namespace powersgd::kernels::cuda {

Status find_code_version(int* version);  // launch.cuh, which takes nvcc's language

}  // namespace powersgd::kernels::cuda

namespace powersgd::test {
namespace {

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// The work that the host waits for. In training it waits for none: a stage is launched while those
// before it run, and back_project may then begin before orthogonalize has ended.
enum class Waits { kForEachStage, kForCopies };

// The CUDA kernels on the current device. All that a runner does is in the order of its own stream.
class CudaRunner : public StageRunner {
 public:
  explicit CudaRunner(Waits waits) : waits_(waits) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~CudaRunner() override {
    cudaStreamSynchronize(stream_);
    for (void* block : blocks_) cudaFree(block);
    cudaStreamDestroy(stream_);
  }
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;

  void* allocate(size_t bytes) override {
    void* block = nullptr;
    check(cudaMalloc(&block, bytes > 0 ? bytes : 1));
    blocks_.push_back(block);
    check(cudaMemsetAsync(block, 0xA5, bytes, stream_));
    return block;
  }

  void copy_in(void* device, const void* host, size_t bytes) override {
    copy(device, host, bytes, cudaMemcpyHostToDevice);
  }
  void copy_out(void* host, const void* device, size_t bytes) override {
    copy(host, device, bytes, cudaMemcpyDeviceToHost);
  }

  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw) override {
    return kernels::cuda::make_tiles(matrices, raw);
  }

  void run(Stage stage, const kernels::Bucket& bucket) override { run_kernel(stage, bucket); }
  void run(PacketStage stage, const kernels::Packets& packets) override {
    run_kernel(stage, packets);
  }

 private:
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) const {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_));
    check(cudaStreamSynchronize(stream_));
  }

  template <class AnyStage, class Input>
  void run_kernel(AnyStage stage, const Input& input) const {
    check(static_cast<cudaError_t>(launch(stage, input, stream_)));
    if (waits_ == Waits::kForEachStage) check(cudaStreamSynchronize(stream_));
  }

  const Waits waits_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
};

RunnerFactory cuda_runner(const std::string& name, Waits waits = Waits::kForEachStage) {
  return {name, [=] { return std::make_unique<CudaRunner>(waits); }};
}

RunnerFactory back_to_back(const std::string& name) {
  return cuda_runner("cuda_back_to_back_" + name, Waits::kForCopies);
}

}  // namespace

std::vector<RunnerFactory> stage_runners() { return {cuda_runner("cuda")}; }

bool run_cpu_kernels() { return false; }

bool have_bfloat16_products() {
  int version = 0;
  check(static_cast<cudaError_t>(kernels::cuda::find_code_version(&version)));
  return version >= 80;
}

// They run one after the other, and the results must not depend on timing.
std::vector<std::vector<RunnerFactory>> runners_equal_in_all_stages() {
  return {{cuda_runner("cuda_1"), cuda_runner("cuda_2"), back_to_back("1"), back_to_back("2")}};
}

std::vector<RunnerFactory> runners_equal_in_shared_stages() {
  return {cuda_runner("cuda_1"), cuda_runner("cuda_2"), back_to_back("1")};
}

}  // namespace powersgd::test

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;  // as ctest is told
  ::testing::InitGoogleTest(&argc, argv);
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(status));
    return kSkipped;
  }
  return RUN_ALL_TESTS();
}

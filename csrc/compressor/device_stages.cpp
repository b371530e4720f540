// SPDX-License-Identifier: BSD-3-Clause
#include "compressor/device_stages.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <optional>

namespace powersgd {
namespace {

class CpuStages final : public Stages {
 public:
  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw) const override {
    return kernels::cpu::make_tiles(matrices, raw);
  }
  void random_start(const kernels::Bucket& bucket) const override {
    kernels::cpu::random_start(bucket, parallel_for);
  }
  void project(const kernels::Bucket& bucket) const override {
    kernels::cpu::project(bucket, parallel_for);
  }
  void orthogonalize(const kernels::Bucket& bucket) const override {
    kernels::cpu::orthogonalize(bucket, parallel_for);
  }
  void back_project(const kernels::Bucket& bucket) const override {
    kernels::cpu::back_project(bucket, parallel_for);
  }
  void reconstruct(const kernels::Bucket& bucket) const override {
    kernels::cpu::reconstruct(bucket, parallel_for);
  }
  bool multiplies(const kernels::Bucket&) const override { return true; }
  void quantize(const kernels::Packets& packets) const override {
    kernels::cpu::quantize(packets, parallel_for);
  }
  void requantize(const kernels::Packets& packets) const override {
    kernels::cpu::requantize(packets, parallel_for);
  }
  void dequantize(const kernels::Packets& packets) const override {
    kernels::cpu::dequantize(packets, parallel_for);
  }

 private:
  // These are torch's own threads: torch.set_num_threads and OMP_NUM_THREADS apply.
  static void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    at::parallel_for(0, count, /*grain_size=*/1, body);
  }
};

#ifdef POWERSGD_WITH_CUDA
class CudaStages final : public Stages {
 public:
  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw) const override {
    return kernels::cuda::make_tiles(matrices, raw);
  }
  void random_start(const kernels::Bucket& bucket) const override {
    check("random_start", kernels::cuda::random_start(bucket, current_stream()));
  }
  void project(const kernels::Bucket& bucket) const override {
    check("project", kernels::cuda::project(bucket, current_stream()));
  }
  void orthogonalize(const kernels::Bucket& bucket) const override {
    check("orthogonalize", kernels::cuda::orthogonalize(bucket, current_stream()));
  }
  void back_project(const kernels::Bucket& bucket) const override {
    check("back_project", kernels::cuda::back_project(bucket, current_stream()));
  }
  void reconstruct(const kernels::Bucket& bucket) const override {
    check("reconstruct", kernels::cuda::reconstruct(bucket, current_stream()));
  }
  bool multiplies(const kernels::Bucket& bucket) const override {
    return kernels::cuda::multiplies(bucket.largest_rank);
  }
  void quantize(const kernels::Packets& packets) const override {
    check("quantize", kernels::cuda::quantize(packets, current_stream()));
  }
  void requantize(const kernels::Packets& packets) const override {
    check("requantize", kernels::cuda::requantize(packets, current_stream()));
  }
  void dequantize(const kernels::Packets& packets) const override {
    check("dequantize", kernels::cuda::dequantize(packets, current_stream()));
  }
  bool is_capturing() const override { return kernels::cuda::is_capturing(current_stream()); }

 private:
  static kernels::cuda::Stream current_stream() {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    return guard.getStream(guard.getDevice()).native_handle();
  }
  static void check(const char* stage, kernels::cuda::Status status) {
    TORCH_CHECK(status == 0, "powersgd: the CUDA launch of ", stage,
                " failed: ", kernels::cuda::error_name(status));
  }
};
#endif

constexpr auto kDeviceTypes = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);
std::array<std::atomic<const Stages*>, kDeviceTypes> added;

}  // namespace

void add_stages(c10::DeviceType device, const Stages& stages) {
  added.at(static_cast<size_t>(device)) = &stages;
}

const Stages* find_stages(c10::DeviceType device) {
  static const CpuStages cpu;
  if (device == c10::DeviceType::CPU) return &cpu;
#ifdef POWERSGD_WITH_CUDA
  static const CudaStages cuda;
  if (device == c10::DeviceType::CUDA) return &cuda;
#endif
  return added.at(static_cast<size_t>(device));
}

const Stages& require_stages(c10::DeviceType device) {
  const Stages* stages = find_stages(device);
  TORCH_CHECK(stages != nullptr, "powersgd: this build has no kernels for ", device,
              " tensors; rebuild it with that device's toolkit");
  return *stages;
}

bool is_capturing(c10::Device device) {
  const Stages* stages = find_stages(device.type());
  if (stages == nullptr) return false;
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
  return stages->is_capturing();
}

}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
//
// What a compressor needs of torch on the fake device: each operator and stage is enqueued on the
// current stream, and computes as the CPU does when its turn comes.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "compressor/stages.h"
#include "support/fake_device.h"

namespace powersgd::test::fake_device {
namespace {

using Sizes = at::IntArrayRef;

// Another tensor of the same memory.
at::Tensor alias(const at::Tensor& tensor, at::Device device, Sizes sizes, Sizes strides,
                 int64_t offset = 0) {
  char* memory = static_cast<char*>(tensor.storage().mutable_data());
  return at::for_blob(memory + (tensor.storage_offset() + offset) * tensor.element_size(), sizes)
      .strides(strides)
      .options(tensor.options().device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor on_host(const at::Tensor& tensor) {
  return alias(tensor, at::kCPU, tensor.sizes(), tensor.strides());
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device,
                         std::optional<bool>) {
  const auto options = at::TensorOptions(dtype.value_or(at::kFloat)).device(device);
  int64_t numel = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    numel = sizes[i] == 0 ? 0 : numel + (sizes[i] - 1) * strides[i];
    if (numel == 0) break;
  }
  const auto bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  return at::for_blob(allocate(bytes), sizes)
      .strides(strides)
      .options(options)
      .target_device(*device)
      .make_tensor();
}

at::Tensor empty(Sizes sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat>) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return empty_strided(sizes, strides, dtype, layout, device, pinned);
}

at::Tensor as_strided(const at::Tensor& self, Sizes sizes, Sizes strides,
                      std::optional<int64_t> offset) {
  const int64_t own = self.storage_offset();
  return alias(self, self.device(), sizes, strides, offset.value_or(own) - own);
}

at::Tensor view(const at::Tensor& self, Sizes sizes) {
  const at::Tensor viewed = on_host(self).view(sizes);
  return alias(self, self.device(), viewed.sizes(), viewed.strides());
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  enqueue(self.device(), [host = on_host(self), value]() mutable { host.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool /*non_blocking*/) {
  TORCH_CHECK(!target.is_cpu(), "the host waits for the device");
  const at::Tensor source = self.is_cpu() ? self : on_host(self);
  enqueue(target.device(), [source, host = on_host(target)] { host.copy_(source); });
  return target;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("fill_.Scalar", fill);
  library.impl("zero_", zero);
  library.impl("_copy_from", copy_from);
}

class EnqueuedStages final : public Stages {
 public:
  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw,
                                DType factor_dtype) const override {
    return kernels::cpu::make_tiles(matrices, raw, factor_dtype);
  }
  void random_start(const kernels::Bucket& bucket) const override {
    enqueue_stage(bucket, kernels::cpu::random_start);
  }
  void project(const kernels::Bucket& bucket) const override {
    enqueue_stage(bucket, kernels::cpu::project);
  }
  void orthogonalize(const kernels::Bucket& bucket) const override {
    enqueue_stage(bucket, kernels::cpu::orthogonalize);
  }
  void back_project(const kernels::Bucket& bucket) const override {
    enqueue_stage(bucket, kernels::cpu::back_project);
  }
  void project_transposed(const kernels::Bucket& bucket) const override {
    enqueue_stage(bucket, kernels::cpu::project_transposed);
  }
  void reconstruct(const kernels::Bucket& bucket) const override {
    enqueue_stage(bucket, kernels::cpu::reconstruct);
  }

 private:
  using Stage = void (*)(const kernels::Bucket&, const kernels::cpu::ParallelFor&);

  // As a kernel launch: what the bucket says is copied, what it points to is not.
  static void enqueue_stage(const kernels::Bucket& bucket, Stage stage) {
    enqueue(current_device(), [bucket, stage] {
      stage(bucket, [](int64_t count, const auto& body) { body(0, count); });
    });
  }
};

}  // namespace

void add_operators() {
  static const EnqueuedStages stages;
  add_stages(device(0).type(), stages);
}

}  // namespace powersgd::test::fake_device

// SPDX-License-Identifier: BSD-3-Clause
//
// The operators and stages that a compressor needs on the fake device. Each is enqueued on the
// current stream. When its turn comes, an operator computes as on the CPU, and a stage as the
// program's stage_runners() do.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <memory>

#include "compressor/device_stages.h"
#include "fake_device/fake_device.h"
#include "kernels/runners/stage_runner.h"

namespace powersgd::test::fake_device {
namespace {

using Sizes = at::IntArrayRef;

char* data_of(const at::Tensor& tensor, int64_t offset = 0) {
  char* memory = static_cast<char*>(tensor.storage().mutable_data());
  return memory + (tensor.storage_offset() + offset) * tensor.element_size();
}

// Returns another tensor over the same memory, which it keeps.
at::Tensor alias(const at::Tensor& tensor, Sizes sizes, Sizes strides, int64_t offset = 0) {
  return at::for_blob(data_of(tensor, offset), sizes)
      .strides(strides)
      .deleter([kept = tensor.storage()](void*) {})
      .options(tensor.options())
      .target_device(tensor.device())
      .make_tensor();
}

// Returns the tensor as an enqueued operation sees it. Like a kernel, it does not keep the memory.
at::Tensor on_host(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  return at::from_blob(data_of(tensor), tensor.sizes(), tensor.strides(), options);
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
  return at::for_blob(allocate(*device, bytes), sizes)
      .strides(strides)
      .deleter(release)
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
  return alias(self, sizes, strides, offset.value_or(own) - own);
}

at::Tensor view(const at::Tensor& self, Sizes sizes) {
  const at::Tensor viewed = on_host(self).view(sizes);
  return alias(self, viewed.sizes(), viewed.strides());
}

c10::Event record_current_stream(at::Device device) {
  c10::Event reached(device.type());
  reached.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return reached;
}

void wait_for_current_stream(at::Device device) { record_current_stream(device).synchronize(); }

// Makes the current stream of `second` wait for that of `first`.
void order_after(at::Device second, at::Device first) {
  record_current_stream(first).block(c10::impl::VirtualGuardImpl(second.type()).getStream(second));
}

at::Scalar item(const at::Tensor& self) {
  wait_for_current_stream(self.device());
  return on_host(self).item();
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (self.is_cpu() || target.is_cpu()) refuse_during_capture("a copy to or from the host");
  count_operator();
  if (target.is_cpu()) {
    const auto copy = [source = on_host(self), target] { target.copy_(source); };
    if (non_blocking) {  // as into pinned memory
      enqueue(self.device(), copy);
    } else {
      wait_for_current_stream(self.device());
      copy();
    }
    return target;
  }
  // A copy from another device runs in the order of both current streams, as in CUDA.
  const bool elsewhere = !self.is_cpu() && self.device() != target.device();
  if (elsewhere) order_after(target.device(), self.device());
  if (self.is_cpu()) count_upload();
  const at::Tensor source = self.is_cpu() ? self : on_host(self);
  enqueue(target.device(), [source, host = on_host(target)] { host.copy_(source); });
  if (elsewhere) order_after(self.device(), target.device());
  return target;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", item);
}

// Every other operator is run twice: at once on zeros of its arguments' shapes, which gives the
// shapes of its results, and enqueued on their values.
using Stack = torch::jit::Stack;

// Returns `value` with each tensor of the device, alone or in a list, replaced.
template <class Replace>
c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor() && value.toTensor().defined()) {
    return value.toTensor().is_cpu() ? value : c10::IValue(replace(value.toTensor()));
  }
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(replace(tensor));
  return tensors;
}

template <class Replace>
Stack all_replaced(const Stack& values, const Replace& replace) {
  Stack result;
  for (const c10::IValue& value : values) result.push_back(replaced(value, replace));
  return result;
}

std::optional<at::Device> device_of(const Stack& values) {
  std::optional<at::Device> device;
  (void)all_replaced(values, [&](const at::Tensor& tensor) {
    device = tensor.device();
    return tensor;
  });
  return device;
}

at::Tensor stand_in(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
}

// Returns the argument that an operator writes and returns, if it has one.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t result) {
  const c10::AliasInfo* returned = schema.returns()[result].alias_info();
  if (returned == nullptr) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* argument = schema.arguments()[i].alias_info();
    if (argument != nullptr && *argument == *returned) return i;
  }
  return std::nullopt;
}

void enqueue_operator(const c10::OperatorHandle& op, Stack* stack) {
  count_operator();
  const Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const at::Device device = *device_of(arguments);
  Stack shapes = all_replaced(arguments, stand_in);
  op.callBoxed(shapes);
  Stack results, new_on_host;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor shape = shapes[i].toTensor();
    const auto written = written_argument(op.schema(), i);
    if (written) {
      results.push_back(arguments[*written]);
      new_on_host.emplace_back();
      if (results.back().toTensor().sizes() == shape.sizes()) continue;
    }
    const at::Tensor fresh =
        empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, device, {});
    if (written) {  // out=..., resized
      at::TensorImpl* out = results.back().toTensor().unsafeGetTensorImpl();
      out->set_storage_keep_dtype(fresh.storage());
      out->set_sizes_and_strides(shape.sizes(), shape.strides());
    } else {
      results.push_back(fresh);
      new_on_host.push_back(on_host(fresh));
    }
  }
  enqueue(device, [op, host = all_replaced(arguments, on_host), new_on_host] {
    Stack computed = host;
    op.callBoxed(computed);
    for (size_t i = 0; i < computed.size(); ++i) {
      if (new_on_host[i].isTensor()) new_on_host[i].toTensor().copy_(computed[i].toTensor());
    }
  });
  stack->insert(stack->end(), results.begin(), results.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue_operator>());
}

class EnqueuedStages final : public Stages {
 public:
  kernels::TileTable make_tiles(const std::vector<kernels::Matrix>& matrices,
                                const std::vector<kernels::RawSegment>& raw) const override {
    return runner_->make_tiles(matrices, raw);
  }
  void random_start(const kernels::Bucket& bucket) const override {
    enqueue_stage(Stage::kRandomStart, bucket);
  }
  void project(const kernels::Bucket& bucket) const override {
    enqueue_stage(Stage::kProject, bucket);
  }
  void orthogonalize(const kernels::Bucket& bucket) const override {
    enqueue_stage(Stage::kOrthogonalize, bucket);
  }
  void back_project(const kernels::Bucket& bucket) const override {
    enqueue_stage(Stage::kBackProject, bucket);
  }
  void reconstruct(const kernels::Bucket& bucket) const override {
    enqueue_stage(Stage::kReconstruct, bucket);
  }
  bool multiplies(const kernels::Bucket& bucket) const override {
    return runner_->multiplies(bucket);
  }
  void quantize(const kernels::Packets& packets) const override {
    enqueue_stage(PacketStage::kQuantize, packets);
  }
  void requantize(const kernels::Packets& packets) const override {
    enqueue_stage(PacketStage::kRequantize, packets);
  }
  void dequantize(const kernels::Packets& packets) const override {
    enqueue_stage(PacketStage::kDequantize, packets);
  }
  bool is_capturing() const override { return fake_device::is_capturing(current_device()); }

 private:
  // Like a kernel launch, copies `argument` and not the memory that it points to.
  template <class AnyStage, class Argument>
  void enqueue_stage(AnyStage stage, const Argument& argument) const {
    enqueue(current_device(), [this, stage, argument] { runner_->run(stage, argument); });
  }

  const std::unique_ptr<StageRunner> runner_ = stage_runners().back().make();
};

}  // namespace

void add_operators() {
  static const EnqueuedStages stages;
  add_stages(device(0).type(), stages);
}

}  // namespace powersgd::test::fake_device

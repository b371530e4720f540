// SPDX-License-Identifier: BSD-3-Clause
#include "support/fake_device.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>

namespace powersgd::test::fake_device {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// Each time it is recorded it gets a version, which its stream reaches later.
struct Event {
  int64_t recorded = 0;
  int64_t reached = 0;
};

using Operation = std::function<bool()>;  // false: not yet
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

struct State {
  std::map<StreamKey, std::deque<Operation>> queues;
  std::vector<std::shared_ptr<Event>> events;
  std::vector<Use> uses;
  std::array<c10::StreamId, kDevices> current{};
  c10::DeviceIndex device = 0;
  c10::StreamId streams = 1;  // so far; 0 is the default stream of each device
};

State state;

c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

std::deque<Operation>& queue_of(const c10::Stream& stream) {
  return state.queues[{stream.device_index(), stream.id()}];
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device(state.device); }
  void setDevice(c10::Device to) const override { state.device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { state.device = to.index(); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(std::exchange(state.device, to.index()));
  }

  c10::Stream getStream(c10::Device of) const override {
    return stream(of.index(), state.current.at(static_cast<size_t>(of.index())));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(of.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*priority*/) const override {
    return stream(of.index(), state.streams++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto& current = state.current.at(static_cast<size_t>(to.device_index()));
    return stream(to.device_index(), std::exchange(current, to.id()));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      state.events.push_back(std::make_shared<Event>());
      *event = state.events.back().get();
    }
    auto* recorded = static_cast<Event*>(*event);
    queue_of(stream).push_back([recorded, version = ++recorded->recorded] {
      recorded->reached = version;
      return true;
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto* awaited = static_cast<Event*>(event);
    queue_of(stream).push_back(
        [awaited, version = awaited->recorded] { return awaited->reached >= version; });
  }
  bool queryEvent(void* event) const override {
    const auto* asked = static_cast<Event*>(event);
    return asked == nullptr || asked->reached >= asked->recorded;
  }
  // A Stream's events are kept until reset: operations refer to them.
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*index*/) const noexcept override {}

  void synchronizeEvent(void* /*event*/) const override { refuse(); }
  void synchronizeStream(const c10::Stream& /*stream*/) const override { refuse(); }
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override { refuse(); }
  static void refuse() { TORCH_CHECK(false, "the host waits for the device"); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    state.uses.emplace_back(data.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace

c10::Device device(c10::DeviceIndex index) { return {kType, index}; }

void reset() { state = State(); }

void set_current_device(c10::Device device) { state.device = device.index(); }

c10::Stream use_new_stream(c10::Device device) {
  const GuardImpl impl;
  const c10::Stream stream = impl.getStreamFromGlobalPool(device, false);
  impl.exchangeStream(stream);
  return stream;
}

void enqueue(c10::Device device, std::function<void()> operation) {
  queue_of(GuardImpl().getStream(device)).push_back([operation = std::move(operation)] {
    operation();
    return true;
  });
}

void run(std::mt19937& order) {
  std::vector<std::deque<Operation>*> queues;
  for (auto& [key, queue] : state.queues) queues.push_back(&queue);
  for (;;) {
    std::shuffle(queues.begin(), queues.end(), order);
    bool empty = true, moved = false;
    for (auto* queue : queues) {
      if (queue->empty()) continue;
      empty = false;
      if (!queue->front()()) continue;
      queue->pop_front();
      moved = true;
      break;  // one operation, then any stream again
    }
    if (empty) return;
    TORCH_CHECK(moved, "all streams wait");
  }
}

const std::vector<Use>& recorded_uses() { return state.uses; }

at::Tensor tensor(c10::Device device, std::vector<float>& memory) {
  return at::for_blob(memory.data(), {static_cast<int64_t>(memory.size())})
      .options(at::TensorOptions(at::kFloat).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace powersgd::test::fake_device

// SPDX-License-Identifier: BSD-3-Clause
#include "fake_device/fake_device.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "fake_device/capture.h"

namespace powersgd::test::fake_device {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr auto kPoison = static_cast<char>(0xFF);  // NaN, in any floating dtype

// Each record gives it a new version, which its stream reaches later.
struct Event {
  std::atomic<int64_t> recorded{0};
  std::atomic<int64_t> reached{0};
  Capture::Event capture;
};

struct Block {
  std::unique_ptr<char[]> memory;
  size_t bytes;
  c10::Stream owner;
  std::vector<c10::Stream> users;  // other streams
};

struct State {
  std::map<StreamKey, std::deque<Operation>> queues;
  std::vector<std::shared_ptr<Event>> events;  // kept until reset: operations refer to them
  std::vector<Use> uses;
  std::map<const char*, Block> blocks;  // by first byte; kept until reset
  c10::StreamId streams = 1;            // so far; 0 is the default stream of each device
  std::mt19937 order;
  Usage usage;
  Host host = Host::kMayNotWait;
  Capture capture;
};

struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kDevices> streams{};
};

std::recursive_mutex mutex;  // an operation may release memory
State state;                 // under the mutex
thread_local Current current;

c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

void push(const c10::Stream& stream, Operation operation) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  state.capture.enqueued(stream, operation);
  state.queues[key_of(stream)].push_back(std::move(operation));
}

// Runs one operation of any stream, under the mutex. Returns false if none is left.
bool run_one() {
  std::vector<std::deque<Operation>*> queues;
  for (auto& [key, queue] : state.queues) {
    if (!queue.empty()) queues.push_back(&queue);
  }
  std::shuffle(queues.begin(), queues.end(), state.order);
  for (auto* queue : queues) {
    if (!queue->front()()) continue;
    queue->pop_front();
    return true;
  }
  TORCH_CHECK(queues.empty(), "all streams wait");
  return false;
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device(current.device); }
  void setDevice(c10::Device to) const override { current.device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current.device = to.index(); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(std::exchange(current.device, to.index()));
  }

  c10::Stream getStream(c10::Device of) const override {
    return stream(of.index(), current.streams.at(static_cast<size_t>(of.index())));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(of.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*priority*/) const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return stream(of.index(), state.streams++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto& before = current.streams.at(static_cast<size_t>(to.device_index()));
    return stream(to.device_index(), std::exchange(before, to.id()));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (*event == nullptr) {
      state.events.push_back(std::make_shared<Event>());
      *event = state.events.back().get();
    }
    auto* recorded = static_cast<Event*>(*event);
    state.queues[key_of(stream)].push_back([recorded, version = ++recorded->recorded] {
      recorded->reached = version;
      return true;
    });
    state.capture.recorded(stream, recorded->capture);
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto* awaited = static_cast<Event*>(event);
    {
      const std::lock_guard<std::recursive_mutex> lock(mutex);
      state.capture.waits(stream, awaited->capture);
    }
    push(stream,
         [awaited, version = awaited->recorded.load()] { return awaited->reached >= version; });
  }
  bool queryEvent(void* event) const override {
    refuse_during_capture("the host queries an event");
    return has_ended(event);
  }
  static bool has_ended(void* event) {
    const auto* asked = static_cast<Event*>(event);
    return asked == nullptr || asked->reached >= asked->recorded;
  }
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*index*/) const noexcept override {}

  void synchronizeEvent(void* event) const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    refuse_during_capture("the host waits for an event");
    TORCH_CHECK(state.host == Host::kMayWait, "the host waits for the device");
    while (!has_ended(event)) run_one();
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override { refuse(); }
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override { refuse(); }
  static void refuse() { TORCH_CHECK(false, "the host waits for more than an event"); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    state.uses.emplace_back(data.get(), stream);
    const auto* address = static_cast<const char*>(data.get());
    auto block = state.blocks.upper_bound(address);
    if (block == state.blocks.begin()) return;
    --block;
    if (address < block->first + block->second.bytes) block->second.users.push_back(stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace

c10::Device device(c10::DeviceIndex index) { return {kType, index}; }

void reset(unsigned seed, Host host) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  state = State();
  state.order.seed(seed);
  state.host = host;
  current = Current();
}

void let_host_wait() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  state.host = Host::kMayWait;
}

c10::Device current_device() { return device(current.device); }

void set_current_device(c10::Device device) { current.device = device.index(); }

c10::Stream use_new_stream(c10::Device device) {
  const GuardImpl impl;
  const c10::Stream stream = impl.getStreamFromGlobalPool(device, false);
  impl.exchangeStream(stream);
  return stream;
}

void enqueue(c10::Device device, std::function<void()> operation) {
  push(GuardImpl().getStream(device), [operation = std::move(operation)] {
    operation();
    return true;
  });
}

void run() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  while (run_one()) {
  }
}

void begin_capture(c10::Device device) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  state.capture.begin(GuardImpl().getStream(device));
}

void end_capture() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  state.capture.end();
}

bool is_capturing(c10::Device device) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return state.capture.has(GuardImpl().getStream(device));
}

void refuse_during_capture(const char* what) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  state.capture.check_host(what);
}

void replay(c10::Device device) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  for (const Operation& operation : state.capture.graph()) {
    enqueue(device, [operation] { operation(); });
  }
}

std::vector<Use> recorded_uses() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return state.uses;
}

at::Tensor tensor(c10::Device device, std::vector<float>& memory) {
  return at::for_blob(memory.data(), {static_cast<int64_t>(memory.size())})
      .options(at::TensorOptions(at::kFloat).device(device))
      .target_device(device)
      .make_tensor();
}

void* allocate(c10::Device device, size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  constexpr size_t kAlignment = 64;
  const size_t size = bytes + kAlignment;
  auto memory = std::make_unique<char[]>(size);
  std::fill_n(memory.get(), size, kPoison);
  char* begin = memory.get() + kAlignment - reinterpret_cast<uintptr_t>(memory.get()) % kAlignment;
  state.blocks.insert_or_assign(begin,
                                Block{std::move(memory), bytes, GuardImpl().getStream(device), {}});
  ++state.usage.allocations;
  state.usage.bytes += bytes;
  state.usage.peak_bytes = std::max(state.usage.peak_bytes, state.usage.bytes);
  return begin;
}

void release(void* memory) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = state.blocks.find(static_cast<const char*>(memory));
  if (found == state.blocks.end()) return;  // reset() dropped it
  const Block& block = found->second;
  state.usage.bytes -= block.bytes;
  // The allocator's own events are no part of a capture.
  const c10::Stream allocator = GuardImpl().getStreamFromGlobalPool(block.owner.device(), false);
  std::vector<c10::Stream> streams = block.users;
  streams.push_back(block.owner);
  for (const c10::Stream& stream : streams) {
    const auto done = std::make_shared<std::atomic<bool>>(false);
    state.queues[key_of(stream)].push_back([done] { return *done = true; });
    state.queues[key_of(allocator)].push_back([done] { return done->load(); });
  }
  push(allocator, [memory, bytes = block.bytes] {
    std::fill_n(static_cast<char*>(memory), bytes, kPoison);
    return true;
  });
}

Usage usage() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return state.usage;
}

void count_upload() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  ++state.usage.uploads;
}

void count_operator() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  ++state.usage.operators;
}

}  // namespace powersgd::test::fake_device

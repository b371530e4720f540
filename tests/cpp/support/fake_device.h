// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <utility>
#include <vector>

// An accelerator as torch sees it, two devices of type PrivateUse1 with streams and events. Nothing
// happens on it until the test says so, or the host waits: then what is enqueued runs in any order
// that streams and events admit. Operations run on the thread that lets them; all else is called
// on any thread.
namespace powersgd::test::fake_device {

c10::Device device(c10::DeviceIndex index);

enum class Host { kMayWait, kMayNotWait };

// Forgets streams, events and what was recorded. On this thread, device 0 and the default streams
// are current. `seed`: of the order in which operations run.
void reset(unsigned seed, Host host);
void let_host_wait();

// Enqueues on the current stream of `device`.
void enqueue(c10::Device device, std::function<void()> operation);

c10::Device current_device();
void set_current_device(c10::Device device);
// A stream that nothing uses yet, made current on its device.
c10::Stream use_new_stream(c10::Device device);

// Runs all that is enqueued. Throws if what is left waits for itself.
void run();

// Storage that an allocator was told of, and the stream.
using Use = std::pair<const void*, c10::Stream>;
std::vector<Use> recorded_uses();

// A tensor on the device whose memory the host can reach.
at::Tensor tensor(c10::Device device, std::vector<float>& memory);

// Memory for the current stream, as CUDA's caching allocator has it: once it is released it may
// be overwritten, in the order of that stream, and after what the other streams that were recorded
// as its users had to do by then. What is released is overwritten here, with NaN.
void* allocate(c10::Device device, size_t bytes);
void release(void* memory);

// Lets torch's operators and the program's stage_runners() run on the device
// (fake_device_operators.cpp).
void add_operators();

}  // namespace powersgd::test::fake_device

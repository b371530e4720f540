// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <utility>
#include <vector>

// An accelerator as torch sees it: two devices of type PrivateUse1 with streams and events. Nothing
// runs on them until the test calls run() or the host waits. Then the enqueued operations run in
// any order that streams and events admit, on the thread that called. Every function may be called
// on any thread.
namespace powersgd::test::fake_device {

c10::Device device(c10::DeviceIndex index);

enum class Host { kMayWait, kMayNotWait };

// Drops all streams, events and records. Makes device 0 and the default streams current on this
// thread. `seed` determines the order in which operations run.
void reset(unsigned seed, Host host);
void let_host_wait();

// Enqueues the operation on the current stream of `device`.
void enqueue(c10::Device device, std::function<void()> operation);

c10::Device current_device();
void set_current_device(c10::Device device);
// Makes a new stream of the device current on this thread, and returns it.
c10::Stream use_new_stream(c10::Device device);

// Runs all enqueued operations. Throws if those that are left wait for each other.
void run();

// Makes a graph of what is enqueued between both calls on the current stream of `device` and on
// those that wait for it, by CUDA's rules (capture.h). It runs at the next run() as well.
// replay() enqueues it once more on the current stream.
void begin_capture(c10::Device device);
void end_capture();
bool is_capturing(c10::Device device);
// Throws if anything is being captured, and makes the capture invalid. Called where the host does
// `what`.
void refuse_during_capture(const char* what);
void replay(c10::Device device);

// A storage and a stream that was recorded as its user.
using Use = std::pair<const void*, c10::Stream>;
std::vector<Use> recorded_uses();

// Returns a tensor on the device over memory that the host can reach.
at::Tensor tensor(c10::Device device, std::vector<float>& memory);

// Allocates memory for the current stream, as CUDA's caching allocator does. Released memory is
// overwritten with NaN, in the order of that stream, and after the operations that streams recorded
// as its users had by then.
void* allocate(c10::Device device, size_t bytes);
void release(void* memory);

// The use of all devices since reset().
struct Usage {
  size_t allocations = 0;
  size_t bytes = 0;       // allocated and not released
  size_t peak_bytes = 0;  // their maximum
  size_t uploads = 0;     // copies from the host's memory
  size_t operators = 0;   // of torch, with the copies
};
Usage usage();
void count_upload();
void count_operator();

// Makes torch's operators and the program's stage_runners() available on the device
// (operators.cpp).
void add_operators();

}  // namespace powersgd::test::fake_device

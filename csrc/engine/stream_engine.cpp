// SPDX-License-Identifier: BSD-3-Clause
#include "engine/stream_engine.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "engine/backend_channel.h"
#include "engine/work.h"

namespace powersgd {

c10::Stream StreamEngine::side_stream(c10::Device device) {
  const auto found = side_streams_.find(device.index());
  if (found != side_streams_.end()) return found->second;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type())
                                 .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  side_streams_.emplace(device.index(), stream);
  return stream;
}

c10::intrusive_ptr<c10d::Work> StreamEngine::submit(std::vector<at::Tensor> tensors, Job job,
                                                    c10::Device device,
                                                    std::chrono::milliseconds timeout) {
  if (closed_) throw_closed();
  const std::lock_guard<std::mutex> lock(mutex_);
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream side = side_stream(device);
  c10::Event ready(device.type());
  ready.record(impl.getStream(device));
  ready.block(side);
  // The allocator must not reuse the memory before the side stream is done with it.
  for (const at::Tensor& tensor : tensors) {
    impl.recordDataPtrOnStream(tensor.storage().data_ptr(), side);
  }

  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(side);
  std::exception_ptr error;
  try {
    BackendChannel channel(*channel_, timeout);
    if (job.first) job.first(channel);
    job.second(channel);
  } catch (...) {
    error = std::current_exception();
  }
  c10::Event done(device.type());
  done.record(side);
  return c10::make_intrusive<StreamWork>(rank_, std::move(tensors), std::move(done), error);
}

}  // namespace powersgd

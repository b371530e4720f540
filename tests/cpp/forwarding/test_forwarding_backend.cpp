// SPDX-License-Identifier: BSD-3-Clause
//
// Calls without tensors, and calls that reach all inner backends. Two recording backends serve as
// inner ones: one for the CPU, one for the meta device in place of an accelerator.
#include "powersgd/forwarding_backend.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/errors.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using test::contains;
using test::error_of;
using test::RecordingBackend;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Recorder = c10::intrusive_ptr<RecordingBackend>;
using Methods = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

constexpr c10::DeviceType kAccelerator = c10::DeviceType::Meta;
constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;

Methods methods(const Recorder& recorder) {
  Methods names;
  for (const auto& call : recorder->calls) names.push_back(call.method);
  return names;
}

class ForwardingBackendTest : public ::testing::Test {
 protected:
  // The CPU comes first, so that it is primary until a device is bound.
  c10::intrusive_ptr<ForwardingBackend> make() {
    return c10::make_intrusive<ForwardingBackend>(0, 2,
                                                  Inners{{kCpu, cpu_}, {kAccelerator, accel_}});
  }
  Recorder cpu_ = c10::make_intrusive<RecordingBackend>(0, 2, "slow");
  Recorder accel_ = c10::make_intrusive<RecordingBackend>(0, 2, "fast");
};

// Calls without tensors.

TEST_F(ForwardingBackendTest, BarrierGoesWhereItsOptionsSay) {
  const auto backend = make();
  c10d::BarrierOptions plain, ids, device;
  ids.device_ids = {0};
  device.device = c10::Device(kAccelerator);

  const auto expect_at = [&](const Recorder& inner, const c10d::BarrierOptions& opts) {
    const WorkPtr work = backend->barrier(opts);
    EXPECT_EQ(work.get(), inner->work.get());
  };
  expect_at(cpu_, plain);
  expect_at(accel_, ids);  // the CPU has no device ids
  expect_at(accel_, device);
  backend->setBoundDeviceId(c10::Device(kAccelerator, 0));
  expect_at(accel_, plain);
  device.device = c10::Device(kCpu);
  expect_at(cpu_, device);

  backend->monitoredBarrier(plain, true);  // always the CPU's
  const auto direct = c10::make_intrusive<RecordingBackend>();
  direct->monitoredBarrier(plain, true);
  EXPECT_EQ(cpu_->calls.back(), direct->calls.back());
}

// After collectives on the accelerator, NCCL's barrier is the one that waits for them.
TEST_F(ForwardingBackendTest, BarrierFollowsTheCollectivesToTheAccelerator) {
  const auto backend = make();
  Tensors on_cpu{at::zeros({2})}, on_accelerator{at::zeros({2}, kAccelerator)};
  backend->broadcast(on_cpu, c10d::BroadcastOptions());
  backend->send(on_accelerator, 1, 0);  // says nothing: other ranks may not have sent
  WorkPtr work = backend->barrier({});
  EXPECT_EQ(work.get(), cpu_->work.get());
  backend->broadcast(on_accelerator, c10d::BroadcastOptions());
  backend->broadcast(on_cpu, c10d::BroadcastOptions());
  work = backend->barrier({});
  EXPECT_EQ(work.get(), accel_->work.get());
}

TEST_F(ForwardingBackendTest, CallsWithoutDeviceGoToThePrimaryInner) {
  const auto backend = make();
  const auto call_all = [&] {
    EXPECT_EQ(backend->getSequenceNumberForGroup(), RecordingBackend::kSequence);
    backend->setSequenceNumberForGroup();
    backend->waitForPendingWorks();
    EXPECT_EQ(backend->getError(), c10d::ErrorType::REMOTE_ERROR);
    backend->registerOnCompletionHook([](const std::shared_ptr<c10d::WorkInfo>&) {});
    EXPECT_TRUE(backend->hasHooks());
  };
  const Methods expected = {"getSequenceNumberForGroup", "setSequenceNumberForGroup",
                            "waitForPendingWorks", "getError", "registerOnCompletionHook"};
  EXPECT_FALSE(backend->hasHooks());
  call_all();
  EXPECT_EQ(methods(cpu_), expected);
  EXPECT_TRUE(accel_->calls.empty());
  EXPECT_EQ(backend->getBackendName(), "slow");
  EXPECT_EQ(backend->getBackendOptions(), cpu_->options);

  backend->setBoundDeviceId(c10::Device(kAccelerator, 0));
  accel_->calls.clear();
  call_all();
  EXPECT_EQ(methods(accel_), expected);
  EXPECT_EQ(methods(cpu_), expected);  // no more than before
  EXPECT_EQ(backend->getBackendName(), "fast");
  EXPECT_EQ(backend->getBackendOptions(), accel_->options);
}

TEST_F(ForwardingBackendTest, DeviceMemoryIsTheAccelerators) {
  const auto backend = make();
  EXPECT_TRUE(backend->supportsTensorAlloc(0));
  backend->getMemAllocator();
  backend->allocateTensor(8, at::TensorOptions());
  backend->eagerConnectSingleDevice(c10::Device(kAccelerator, 0));
  Methods expected = {"supportsTensorAlloc", "getMemAllocator", "allocateTensor",
                      "eagerConnectSingleDevice"};
#ifdef POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD
  backend->suspend();
  backend->resume();
  EXPECT_EQ(backend->getMemoryStats().at("bytes"), 3u);
  expected.insert(expected.end(), {"suspend", "resume", "getMemoryStats"});
#endif
  EXPECT_EQ(methods(accel_), expected);
  EXPECT_TRUE(cpu_->calls.empty());
  backend->allocateTensor(8, at::TensorOptions().device(at::kCPU));
  EXPECT_EQ(methods(cpu_), Methods{"allocateTensor"});
}

TEST_F(ForwardingBackendTest, WhatConcernsTheGroupGoesToEveryInner) {
  const auto backend = make();
  backend->setGroupUid("uid");
  backend->setTimeout(std::chrono::milliseconds(1234));
  backend->enableCollectivesTiming();
  backend->abort();
  backend->shutdown();
  const Methods expected = {"setGroupUid", "setTimeout", "enableCollectivesTiming", "abort",
                            "shutdown"};
  for (const auto& inner : {cpu_, accel_}) {
    EXPECT_EQ(methods(inner), expected);
    EXPECT_EQ(inner->getGroupUid(), "uid");
    EXPECT_EQ(inner->calls[1].arguments, std::vector<int64_t>{1234});
  }
  EXPECT_EQ(backend->getGroupUid(), "uid");
}

TEST_F(ForwardingBackendTest, ShutdownReachesEveryInnerEvenIfOneThrows) {
  const auto backend = make();
  cpu_->fails = true;
  EXPECT_TRUE(contains(error_of([&] { backend->shutdown(); }), "slow fails in shutdown"));
  EXPECT_TRUE(contains(error_of([&] { backend->abort(); }), "slow fails in abort"));
  EXPECT_EQ(methods(accel_), (Methods{"shutdown", "abort"}));
}

TEST_F(ForwardingBackendTest, OneBackendForTwoDevicesIsCalledOnce) {
  const auto backend =
      c10::make_intrusive<ForwardingBackend>(0, 2, Inners{{kCpu, cpu_}, {kAccelerator, cpu_}});
  backend->shutdown();
  EXPECT_EQ(methods(cpu_), Methods{"shutdown"});
}

TEST_F(ForwardingBackendTest, DescriptionAndBoundDeviceReachTheInnerByItsFirstUse) {
  const auto backend = make();
  cpu_->setGroupDesc("as created");
  Tensors tensors{at::zeros({2})};
  backend->broadcast(tensors, c10d::BroadcastOptions());
  EXPECT_EQ(cpu_->getGroupDesc(), "as created");  // the group has none of its own

  backend->setGroupDesc("data parallel");
  backend->setBoundDeviceId(c10::Device(kAccelerator, 3));
  backend->broadcast(tensors, c10d::BroadcastOptions());
  EXPECT_EQ(cpu_->getGroupDesc(), "data parallel");
  EXPECT_EQ(cpu_->getBoundDeviceId(), c10::Device(kAccelerator, 3));
  backend->barrier({});
  EXPECT_EQ(accel_->getGroupDesc(), "data parallel");
  EXPECT_EQ(accel_->getBoundDeviceId(), c10::Device(kAccelerator, 3));
}

TEST_F(ForwardingBackendTest, Capabilities) {
  const auto backend = make();
  EXPECT_TRUE(backend->supportsSplitting());
  EXPECT_TRUE(backend->supportsShrinking());
  EXPECT_FALSE(backend->supportsCoalescing());
#ifndef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
  EXPECT_FALSE(backend->supportsTimeEstimation());
#endif
  accel_->coalesces = true;
  cpu_->splits = false;
  EXPECT_FALSE(backend->supportsSplitting());
  EXPECT_FALSE(backend->supportsShrinking());
  EXPECT_TRUE(backend->supportsCoalescing());
}

TEST_F(ForwardingBackendTest, ConstructorRefusesWhatCannotWork) {
  const auto make_with = [](Inners inners) {
    return error_of([&] { std::ignore = c10::make_intrusive<ForwardingBackend>(1, 2, inners); });
  };
  EXPECT_TRUE(contains(make_with({}), "at least one inner"));
  EXPECT_TRUE(contains(make_with({{kCpu, nullptr}}), "for cpu is None"));
  EXPECT_TRUE(contains(make_with({{kCpu, cpu_}}), "rank 0 of 2, not 1 of 2"));
  const auto one = c10::make_intrusive<RecordingBackend>(1, 2);
  EXPECT_TRUE(contains(make_with({{kCpu, one}, {kCpu, one}}), "two inner backends for cpu"));
}

// Coalescing.

TEST_F(ForwardingBackendTest, CoalescingGoesToThoseThatCan) {
  const auto backend = make();
  accel_->coalesces = true;
  Tensors tensors{at::zeros({2}, kAccelerator)};
  backend->startCoalescing();
  backend->send(tensors, 1, 0);
  const WorkPtr work = backend->endCoalescing();
  EXPECT_EQ(methods(accel_), (Methods{"startCoalescing", "send", "endCoalescing"}));
  EXPECT_EQ(work.get(), accel_->work.get());
  EXPECT_TRUE(cpu_->calls.empty());
}

// batch_isend_irecv waits for the Work of endCoalescing and drops every other one.
TEST_F(ForwardingBackendTest, CoalescingEndsWithWhatCouldNotBeCoalesced) {
  const auto backend = make();
  accel_->coalesces = true;
  Tensors on_cpu{at::zeros({2})};
  backend->startCoalescing();
  backend->send(on_cpu, 1, 0);
  const WorkPtr sent = cpu_->work;
  backend->recv(on_cpu, 1, 0);
  const WorkPtr received = cpu_->work;
  const WorkPtr both = backend->endCoalescing();
  EXPECT_NE(both.get(), sent.get());
  EXPECT_NE(both.get(), received.get());
  EXPECT_FALSE(both->isCompleted());  // the recorder's Works never complete

  backend->startCoalescing();  // the earlier Works are gone
  const WorkPtr last = backend->endCoalescing();
  EXPECT_EQ(last.get(), accel_->work.get());
}

TEST_F(ForwardingBackendTest, WithoutCoalescingTheInnerSaysSo) {
  const auto backend = make();
  backend->startCoalescing();
  EXPECT_EQ(backend->endCoalescing().get(), nullptr);
  EXPECT_EQ(methods(cpu_), (Methods{"startCoalescing", "endCoalescing"}));
  EXPECT_TRUE(accel_->calls.empty());
}

}  // namespace
}  // namespace powersgd

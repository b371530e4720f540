// SPDX-License-Identifier: BSD-3-Clause
//
// Calls without tensors, and calls that reach all inner backends.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "group/recorded_group.h"

namespace powersgd {
namespace {

using test::kAccelerator;
using test::kCpu;
using test::Methods;
using test::Recorder;
using test::RecordingBackend;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class ForwardingBackendTest : public test::RecordedGroup {};

// Calls without tensors.

TEST_F(ForwardingBackendTest, BarrierGoesWhereItsOptionsSay) {
  c10d::BarrierOptions plain, ids, device;
  ids.device_ids = {0};
  device.device = c10::Device(kAccelerator);

  const auto expect_at = [&](const Recorder& inner, const c10d::BarrierOptions& opts) {
    const WorkPtr work = backend_->barrier(opts);
    EXPECT_EQ(work.get(), inner->work.get());
  };
  expect_at(cpu_, plain);
  expect_at(accel_, ids);  // the CPU has no device ids
  expect_at(accel_, device);
  backend_->setBoundDeviceId(c10::Device(kAccelerator, 0));
  expect_at(accel_, plain);
  device.device = c10::Device(kCpu);
  expect_at(cpu_, device);

  backend_->monitoredBarrier(plain, true);  // always the CPU's
  const auto direct = c10::make_intrusive<RecordingBackend>();
  direct->monitoredBarrier(plain, true);
  EXPECT_EQ(cpu_->calls.back(), direct->calls.back());
}

// After collectives on the accelerator, NCCL's barrier is the one that waits for them.
TEST_F(ForwardingBackendTest, BarrierFollowsTheCollectivesToTheAccelerator) {
  Tensors on_cpu{at::zeros({2})}, on_accelerator{at::zeros({2}, kAccelerator)};
  backend_->broadcast(on_cpu, c10d::BroadcastOptions());
  backend_->send(on_accelerator, 1, 0);  // says nothing: other ranks may not have sent
  WorkPtr work = backend_->barrier({});
  EXPECT_EQ(work.get(), cpu_->work.get());
  backend_->broadcast(on_accelerator, c10d::BroadcastOptions());
  backend_->broadcast(on_cpu, c10d::BroadcastOptions());
  work = backend_->barrier({});
  EXPECT_EQ(work.get(), accel_->work.get());
}

TEST_F(ForwardingBackendTest, CallsWithoutDeviceGoToThePrimaryInner) {
  const auto call_all = [&] {
    EXPECT_EQ(backend_->getSequenceNumberForGroup(), RecordingBackend::kSequence);
    backend_->setSequenceNumberForGroup();
    backend_->waitForPendingWorks();
    backend_->registerOnCompletionHook([](const std::shared_ptr<c10d::WorkInfo>&) {});
    EXPECT_TRUE(backend_->hasHooks());
  };
  const Methods expected = {"getSequenceNumberForGroup", "setSequenceNumberForGroup",
                            "waitForPendingWorks", "registerOnCompletionHook"};
  EXPECT_FALSE(backend_->hasHooks());
  call_all();
  EXPECT_EQ(cpu_->methods(), expected);
  EXPECT_TRUE(accel_->calls.empty());
  EXPECT_EQ(backend_->getBackendName(), "slow");
  EXPECT_EQ(backend_->getBackendOptions(), cpu_->options);

  backend_->setBoundDeviceId(c10::Device(kAccelerator, 0));
  accel_->calls.clear();
  call_all();
  EXPECT_EQ(accel_->methods(), expected);
  EXPECT_EQ(cpu_->methods(), expected);  // no more than before
  EXPECT_EQ(backend_->getBackendName(), "fast");
  EXPECT_EQ(backend_->getBackendOptions(), accel_->options);
}

TEST_F(ForwardingBackendTest, DeviceMemoryAndErrorsAreTheAccelerators) {
  EXPECT_EQ(backend_->getError(), c10d::ErrorType::REMOTE_ERROR);
  EXPECT_TRUE(backend_->supportsTensorAlloc(0));
  backend_->getMemAllocator();
  backend_->allocateTensor(8, at::TensorOptions());
  backend_->eagerConnectSingleDevice(c10::Device(kAccelerator, 0));
  Methods expected = {"getError", "supportsTensorAlloc", "getMemAllocator", "allocateTensor",
                      "eagerConnectSingleDevice"};
#ifdef POWERSGD_BACKEND_HAS_MEMORY_OFFLOAD
  backend_->suspend();
  backend_->resume();
  EXPECT_EQ(backend_->getMemoryStats().at("bytes"), 3u);
  expected.insert(expected.end(), {"suspend", "resume", "getMemoryStats"});
#endif
  EXPECT_EQ(accel_->methods(), expected);
  EXPECT_TRUE(cpu_->calls.empty());
  backend_->allocateTensor(8, at::TensorOptions().device(at::kCPU));
  EXPECT_EQ(cpu_->methods(), Methods{"allocateTensor"});
}

TEST_F(ForwardingBackendTest, WhatConcernsTheGroupGoesToEveryInner) {
  backend_->setGroupUid("uid");
  backend_->setTimeout(std::chrono::milliseconds(1234));
  backend_->enableCollectivesTiming();
  backend_->abort();
  backend_->shutdown();
  const Methods expected = {"setGroupUid", "setTimeout", "enableCollectivesTiming", "abort",
                            "shutdown"};
  for (const auto& inner : {cpu_, accel_}) {
    EXPECT_EQ(inner->methods(), expected);
    EXPECT_EQ(inner->getGroupUid(), "uid");
    EXPECT_EQ(inner->calls[1].arguments, std::vector<int64_t>{1234});
  }
  EXPECT_EQ(backend_->getGroupUid(), "uid");
}

TEST_F(ForwardingBackendTest, DescriptionAndBoundDeviceReachTheInnerByItsFirstUse) {
  cpu_->setGroupDesc("as created");
  Tensors tensors{at::zeros({2})};
  backend_->broadcast(tensors, c10d::BroadcastOptions());
  EXPECT_EQ(cpu_->getGroupDesc(), "as created");  // the group has none of its own

  backend_->setGroupDesc("data parallel");
  backend_->setBoundDeviceId(c10::Device(kAccelerator, 3));
  backend_->broadcast(tensors, c10d::BroadcastOptions());
  EXPECT_EQ(cpu_->getGroupDesc(), "data parallel");
  EXPECT_EQ(cpu_->getBoundDeviceId(), c10::Device(kAccelerator, 3));
  backend_->barrier({});
  EXPECT_EQ(accel_->getGroupDesc(), "data parallel");
  EXPECT_EQ(accel_->getBoundDeviceId(), c10::Device(kAccelerator, 3));
}

TEST_F(ForwardingBackendTest, Capabilities) {
  EXPECT_TRUE(backend_->supportsSplitting());
  EXPECT_TRUE(backend_->supportsShrinking());
  EXPECT_FALSE(backend_->supportsCoalescing());
#ifndef POWERSGD_BACKEND_HAS_TIME_ESTIMATE
  EXPECT_FALSE(backend_->supportsTimeEstimation());
#endif
  accel_->coalesces = true;
  cpu_->splits = false;
  EXPECT_FALSE(backend_->supportsSplitting());
  EXPECT_FALSE(backend_->supportsShrinking());
  EXPECT_TRUE(backend_->supportsCoalescing());
}

// Coalescing.

TEST_F(ForwardingBackendTest, CoalescingGoesToThoseThatCan) {
  accel_->coalesces = true;
  Tensors tensors{at::zeros({2}, kAccelerator)};
  backend_->startCoalescing();
  backend_->send(tensors, 1, 0);
  const WorkPtr work = backend_->endCoalescing();
  EXPECT_EQ(accel_->methods(), (Methods{"startCoalescing", "send", "endCoalescing"}));
  EXPECT_EQ(work.get(), accel_->work.get());
  EXPECT_TRUE(cpu_->calls.empty());
}

// batch_isend_irecv waits for the Work of endCoalescing and drops every other one.
TEST_F(ForwardingBackendTest, CoalescingEndsWithWhatCouldNotBeCoalesced) {
  accel_->coalesces = true;
  Tensors on_cpu{at::zeros({2})};
  backend_->startCoalescing();
  backend_->send(on_cpu, 1, 0);
  const WorkPtr sent = cpu_->work;
  backend_->recv(on_cpu, 1, 0);
  const WorkPtr received = cpu_->work;
  const WorkPtr both = backend_->endCoalescing();
  EXPECT_NE(both.get(), sent.get());
  EXPECT_NE(both.get(), received.get());
  EXPECT_FALSE(both->isCompleted());  // the recorder's Works never complete

  backend_->startCoalescing();  // the earlier Works are gone
  const WorkPtr last = backend_->endCoalescing();
  EXPECT_EQ(last.get(), accel_->work.get());
}

TEST_F(ForwardingBackendTest, WithoutCoalescingTheInnerSaysSo) {
  backend_->startCoalescing();
  EXPECT_EQ(backend_->endCoalescing().get(), nullptr);
  EXPECT_EQ(cpu_->methods(), (Methods{"startCoalescing", "endCoalescing"}));
  EXPECT_TRUE(accel_->calls.empty());
}

}  // namespace
}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
// Two recording backends stand for the inner ones: one serves the CPU, one the "accelerator", for
// which the meta device serves, so that this runs with a torch that has no GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "backend/forwarding_backend.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using c10d::Backend;
using test::RecordingBackend;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Recorder = c10::intrusive_ptr<RecordingBackend>;
using Methods = std::vector<std::string>;

constexpr c10::DeviceType kAccelerator = c10::DeviceType::Meta;
constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;

Methods methods(const Recorder& recorder) {
  Methods names;
  for (const auto& call : recorder->calls) names.push_back(call.method);
  return names;
}

template <typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class ForwardingBackendTest : public ::testing::Test {
 protected:
  // The CPU comes first: it is then the primary one until a device is bound.
  c10::intrusive_ptr<ForwardingBackend> make() {
    return c10::make_intrusive<ForwardingBackend>(0, 2,
                                                  Inners{{kCpu, cpu_}, {kAccelerator, accel_}});
  }
  Recorder cpu_ = c10::make_intrusive<RecordingBackend>(0, 2, "slow");
  Recorder accel_ = c10::make_intrusive<RecordingBackend>(0, 2, "fast");
};

// Every call with tensors.

struct Arguments {
  explicit Arguments(c10::DeviceType device)
      : output(at::zeros({4}, device)), input(at::zeros({2}, device)) {}
  at::Tensor output, input;
  std::vector<at::Tensor> outputs{output}, inputs{input};
  std::vector<std::vector<at::Tensor>> lists{{output}};
  std::vector<std::vector<at::Tensor>> no_lists;  // what a rank passes that is not the root
  std::vector<int64_t> output_splits{2, 2}, input_splits{1, 1};
  c10d::BroadcastOptions broadcast;
  c10d::AllreduceOptions allreduce;
  c10d::AllreduceCoalescedOptions allreduce_coalesced;
  c10d::ReduceOptions reduce;
  c10d::AllgatherOptions allgather;
  c10d::GatherOptions gather;
  c10d::ScatterOptions scatter;
  c10d::ReduceScatterOptions reduce_scatter;
  c10d::AllToAllOptions alltoall;
};

struct TensorCall {
  const char* name;
  WorkPtr (*call)(Backend& b, Arguments& a);
};

const TensorCall kTensorCalls[] = {
    {"broadcast", [](Backend& b, Arguments& a) { return b.broadcast(a.inputs, a.broadcast); }},
    {"allreduce", [](Backend& b, Arguments& a) { return b.allreduce(a.inputs, a.allreduce); }},
    {"allreduce_sparse",
     [](Backend& b, Arguments& a) { return b.allreduce_sparse(a.inputs, a.allreduce); }},
    {"allreduce_coalesced",
     [](Backend& b, Arguments& a) {
       return b.allreduce_coalesced(a.inputs, a.allreduce_coalesced);
     }},
    {"reduce", [](Backend& b, Arguments& a) { return b.reduce(a.inputs, a.reduce); }},
    {"allgather",
     [](Backend& b, Arguments& a) { return b.allgather(a.lists, a.inputs, a.allgather); }},
    {"_allgather_base",
     [](Backend& b, Arguments& a) { return b._allgather_base(a.output, a.input, a.allgather); }},
    {"allgather_coalesced",
     [](Backend& b, Arguments& a) {
       return b.allgather_coalesced(a.lists, a.inputs, a.allgather);
     }},
    {"allgather_into_tensor_coalesced",
     [](Backend& b, Arguments& a) {
       return b.allgather_into_tensor_coalesced(a.outputs, a.inputs, a.allgather);
     }},
    {"gather", [](Backend& b, Arguments& a) { return b.gather(a.lists, a.inputs, a.gather); }},
    {"gather_not_root",
     [](Backend& b, Arguments& a) { return b.gather(a.no_lists, a.inputs, a.gather); }},
    {"scatter", [](Backend& b, Arguments& a) { return b.scatter(a.outputs, a.lists, a.scatter); }},
    {"scatter_not_root",
     [](Backend& b, Arguments& a) { return b.scatter(a.outputs, a.no_lists, a.scatter); }},
    {"reduce_scatter",
     [](Backend& b, Arguments& a) {
       return b.reduce_scatter(a.outputs, a.lists, a.reduce_scatter);
     }},
    {"_reduce_scatter_base",
     [](Backend& b, Arguments& a) {
       return b._reduce_scatter_base(a.output, a.input, a.reduce_scatter);
     }},
    {"reduce_scatter_tensor_coalesced",
     [](Backend& b, Arguments& a) {
       return b.reduce_scatter_tensor_coalesced(a.outputs, a.inputs, a.reduce_scatter);
     }},
    {"alltoall_base",
     [](Backend& b, Arguments& a) {
       return b.alltoall_base(a.output, a.input, a.output_splits, a.input_splits, a.alltoall);
     }},
    {"alltoall",
     [](Backend& b, Arguments& a) { return b.alltoall(a.outputs, a.inputs, a.alltoall); }},
    {"send", [](Backend& b, Arguments& a) { return b.send(a.inputs, 1, 5); }},
    {"recv", [](Backend& b, Arguments& a) { return b.recv(a.inputs, 1, 6); }},
    {"recvAnysource", [](Backend& b, Arguments& a) { return b.recvAnysource(a.inputs, 7); }},
#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
    {"gather_into_tensor",
     [](Backend& b, Arguments& a) { return b.gather_into_tensor(a.output, a.input, a.gather); }},
    {"all_gather_single",
     [](Backend& b, Arguments& a) { return b.all_gather_single(a.output, a.input, a.allgather); }},
    {"reduce_scatter_single",
     [](Backend& b, Arguments& a) {
       return b.reduce_scatter_single(a.output, a.input, a.reduce_scatter);
     }},
#endif
};

class TensorCallTest : public ForwardingBackendTest,
                       public ::testing::WithParamInterface<TensorCall> {};

INSTANTIATE_TEST_SUITE_P(ForwardingBackend, TensorCallTest, ::testing::ValuesIn(kTensorCalls),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(TensorCallTest, ReachesTheInnerOfItsDeviceUnchanged) {
  for (const auto device : {kCpu, kAccelerator}) {
    Arguments arguments(device);
    RecordingBackend direct;
    GetParam().call(direct, arguments);
    ASSERT_EQ(direct.calls.size(), 1u);

    const Recorder& target = device == kCpu ? cpu_ : accel_;
    const Recorder& other = device == kCpu ? accel_ : cpu_;
    cpu_->calls.clear();
    accel_->calls.clear();
    const WorkPtr work = GetParam().call(*make(), arguments);
    EXPECT_EQ(target->calls, direct.calls);  // the same objects, by address
    EXPECT_EQ(work.get(), target->work.get());
    EXPECT_TRUE(other->calls.empty());
  }
}

TEST_P(TensorCallTest, NamesTheDeviceThatHasNoInner) {
  const auto backend = c10::make_intrusive<ForwardingBackend>(0, 2, Inners{{kCpu, cpu_}});
  Arguments arguments(kAccelerator);
  const std::string error = error_of([&] { GetParam().call(*backend, arguments); });
  EXPECT_TRUE(contains(error, "no inner backend for device type meta")) << error;
  EXPECT_TRUE(contains(error, "cpu (slow)")) << error;
  EXPECT_TRUE(cpu_->calls.empty());
}

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
  Arguments arguments(kCpu);
  backend->broadcast(arguments.inputs, arguments.broadcast);
  EXPECT_EQ(cpu_->getGroupDesc(), "as created");  // nothing to replace it

  backend->setGroupDesc("data parallel");
  backend->setBoundDeviceId(c10::Device(kAccelerator, 3));
  backend->broadcast(arguments.inputs, arguments.broadcast);
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
    return error_of([&] { c10::make_intrusive<ForwardingBackend>(1, 2, inners); });
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
  Arguments arguments(kAccelerator);
  backend->startCoalescing();
  backend->send(arguments.inputs, 1, 0);
  const WorkPtr work = backend->endCoalescing();
  EXPECT_EQ(methods(accel_), (Methods{"startCoalescing", "send", "endCoalescing"}));
  EXPECT_EQ(work.get(), accel_->work.get());
  EXPECT_TRUE(cpu_->calls.empty());
}

// batch_isend_irecv waits on what endCoalescing returns and drops every other Work.
TEST_F(ForwardingBackendTest, CoalescingEndsWithWhatCouldNotBeCoalesced) {
  const auto backend = make();
  accel_->coalesces = true;
  Arguments on_cpu(kCpu);
  backend->startCoalescing();
  backend->send(on_cpu.inputs, 1, 0);
  const WorkPtr sent = cpu_->work;
  backend->recv(on_cpu.inputs, 1, 0);
  const WorkPtr received = cpu_->work;
  const WorkPtr both = backend->endCoalescing();
  EXPECT_NE(both.get(), sent.get());
  EXPECT_NE(both.get(), received.get());
  EXPECT_FALSE(both->isCompleted());  // the recorder's Works never complete

  backend->startCoalescing();  // nothing of before is left
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

// SPDX-License-Identifier: BSD-3-Clause
//
// Every call with tensors reaches the inner backend of their device with the same arguments, and
// returns that backend's Work. The meta device stands for an accelerator.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "powersgd/forwarding_backend.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using c10d::Backend;
using test::RecordingBackend;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr c10::DeviceType kAccelerator = c10::DeviceType::Meta;
constexpr c10::DeviceType kCpu = c10::DeviceType::CPU;

struct Arguments {
  explicit Arguments(c10::DeviceType device)
      : output(at::zeros({4}, device)), input(at::zeros({2}, device)) {}
  at::Tensor output, input;
  std::vector<at::Tensor> outputs{output}, inputs{input};
  std::vector<std::vector<at::Tensor>> lists{{output}};
  std::vector<std::vector<at::Tensor>> no_lists;  // passed by a rank that is not the root
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
    // The new names reach the inner backend by the old ones.
    {"all_gather_single",
     [](Backend& b, Arguments& a) { return b.all_gather_single(a.output, a.input, a.allgather); }},
    {"all_gather_single_coalesced",
     [](Backend& b, Arguments& a) {
       return b.all_gather_single_coalesced(a.outputs, a.inputs, a.allgather);
     }},
    {"gather_single",
     [](Backend& b, Arguments& a) { return b.gather_single(a.output, a.input, a.gather); }},
    {"reduce_scatter_single",
     [](Backend& b, Arguments& a) {
       return b.reduce_scatter_single(a.output, a.input, a.reduce_scatter);
     }},
    {"reduce_scatter_single_coalesced",
     [](Backend& b, Arguments& a) {
       return b.reduce_scatter_single_coalesced(a.outputs, a.inputs, a.reduce_scatter);
     }},
    {"all_to_all_single",
     [](Backend& b, Arguments& a) {
       return b.all_to_all_single(a.output, a.input, a.output_splits, a.input_splits, a.alltoall);
     }},
#endif
};

class TensorCallTest : public ::testing::TestWithParam<TensorCall> {};

INSTANTIATE_TEST_SUITE_P(ForwardingBackend, TensorCallTest, ::testing::ValuesIn(kTensorCalls),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(TensorCallTest, ReachesTheInnerOfItsDeviceUnchanged) {
  for (const auto device : {kCpu, kAccelerator}) {
    Arguments arguments(device);
    RecordingBackend direct;
    GetParam().call(direct, arguments);
    ASSERT_EQ(direct.calls.size(), 1u);

    const auto target = c10::make_intrusive<RecordingBackend>();
    const auto other = c10::make_intrusive<RecordingBackend>();
    const bool cpu = device == kCpu;
    ForwardingBackend backend(0, 2,
                              {{kCpu, cpu ? target : other}, {kAccelerator, cpu ? other : target}});
    const WorkPtr work = GetParam().call(backend, arguments);
    EXPECT_EQ(target->calls, direct.calls);  // the same objects, by address
    EXPECT_EQ(work.get(), target->work.get());
    EXPECT_TRUE(other->calls.empty());
  }
}

TEST_P(TensorCallTest, NamesTheDeviceThatHasNoInner) {
  const auto inner = c10::make_intrusive<RecordingBackend>(0, 2, "slow");
  ForwardingBackend backend(0, 2, {{kCpu, inner}});
  Arguments arguments(kAccelerator);
  try {
    GetParam().call(backend, arguments);
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("no inner backend for device type meta"), std::string::npos) << text;
    EXPECT_NE(text.find("cpu (slow)"), std::string::npos) << text;
  }
  EXPECT_TRUE(inner->calls.empty());
}

}  // namespace
}  // namespace powersgd

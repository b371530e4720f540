// SPDX-License-Identifier: BSD-3-Clause
//
// Every call with tensors reaches the inner backend of their device with the same arguments, and
// returns that backend's Work.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "group/recorded_group.h"
#include "support/errors.h"

namespace powersgd {
namespace {

using c10d::Backend;
using test::kAccelerator;
using test::kCpu;
using test::RecordingBackend;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

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

#define POWERSGD_CALL(method, ...) \
  {#method, [](Backend& b, Arguments& a) { return b.method(__VA_ARGS__); }}

const TensorCall kTensorCalls[] = {
    POWERSGD_CALL(broadcast, a.inputs, a.broadcast),
    POWERSGD_CALL(allreduce, a.inputs, a.allreduce),
    POWERSGD_CALL(allreduce_sparse, a.inputs, a.allreduce),
    POWERSGD_CALL(allreduce_coalesced, a.inputs, a.allreduce_coalesced),
    POWERSGD_CALL(reduce, a.inputs, a.reduce),
    POWERSGD_CALL(allgather, a.lists, a.inputs, a.allgather),
    POWERSGD_CALL(_allgather_base, a.output, a.input, a.allgather),
    POWERSGD_CALL(allgather_coalesced, a.lists, a.inputs, a.allgather),
    POWERSGD_CALL(allgather_into_tensor_coalesced, a.outputs, a.inputs, a.allgather),
    POWERSGD_CALL(gather, a.lists, a.inputs, a.gather),
    POWERSGD_CALL(gather, a.no_lists, a.inputs, a.gather),
    POWERSGD_CALL(scatter, a.outputs, a.lists, a.scatter),
    POWERSGD_CALL(scatter, a.outputs, a.no_lists, a.scatter),
    POWERSGD_CALL(reduce_scatter, a.outputs, a.lists, a.reduce_scatter),
    POWERSGD_CALL(_reduce_scatter_base, a.output, a.input, a.reduce_scatter),
    POWERSGD_CALL(reduce_scatter_tensor_coalesced, a.outputs, a.inputs, a.reduce_scatter),
    POWERSGD_CALL(alltoall_base, a.output, a.input, a.output_splits, a.input_splits, a.alltoall),
    POWERSGD_CALL(alltoall, a.outputs, a.inputs, a.alltoall),
    POWERSGD_CALL(send, a.inputs, 1, 5),
    POWERSGD_CALL(recv, a.inputs, 1, 6),
    POWERSGD_CALL(recvAnysource, a.inputs, 7),
#ifdef POWERSGD_BACKEND_HAS_LIFECYCLE
    POWERSGD_CALL(gather_into_tensor, a.output, a.input, a.gather),
    // The new names reach the inner backend by the old ones.
    POWERSGD_CALL(all_gather_single, a.output, a.input, a.allgather),
    POWERSGD_CALL(all_gather_single_coalesced, a.outputs, a.inputs, a.allgather),
    POWERSGD_CALL(gather_single, a.output, a.input, a.gather),
    POWERSGD_CALL(reduce_scatter_single, a.output, a.input, a.reduce_scatter),
    POWERSGD_CALL(reduce_scatter_single_coalesced, a.outputs, a.inputs, a.reduce_scatter),
    POWERSGD_CALL(all_to_all_single, a.output, a.input, a.output_splits, a.input_splits,
                  a.alltoall),
#endif
};

#undef POWERSGD_CALL

class TensorCallTest : public ::testing::TestWithParam<TensorCall> {};

INSTANTIATE_TEST_SUITE_P(ForwardingBackend, TensorCallTest, ::testing::ValuesIn(kTensorCalls),
                         [](const auto& test) {
                           return test.param.name + ("_" + std::to_string(test.index));
                         });

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
  const std::string error = test::error_of([&] { GetParam().call(backend, arguments); });
  EXPECT_TRUE(test::contains(error, "no inner backend for device type meta")) << error;
  EXPECT_TRUE(test::contains(error, "cpu (slow)")) << error;
  EXPECT_TRUE(inner->calls.empty());
}

}  // namespace
}  // namespace powersgd

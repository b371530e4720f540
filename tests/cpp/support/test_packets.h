// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "powersgd/packets.h"
#include "support/stage_runner.h"
#include "support/test_bucket.h"

namespace powersgd::test {

// A payload with the P or the Q of some matrices, their raw segments, and flags.
struct PacketSpec {
  std::vector<Part> parts;
  bool is_q = false;
  DType factor_dtype = DType::kFloat32;
  DType raw_dtype = DType::kFloat32;  // float64 for factors in float64
  WireDType wire = WireDType::kInt8;
  int64_t flags = 3;
  int64_t misalignment = 0;  // elements by which every array starts past an aligned address
};

std::string describe(const PacketSpec& spec);

// How ranks exchange packets.
struct Exchange {
  int32_t ranks = 1;
  bool two_shot = false;

  int32_t chunks() const { return two_shot ? ranks : 1; }
};

// The elements of a group, by their numbers in the payload, and the rank that owns the group.
struct PacketGroup {
  std::vector<size_t> elements;
  int64_t owner;  // always 0 one-shot
};

// The packets of one rank, in the memory of a runner. All values are zeros at first.
class TestPackets {
 public:
  TestPackets(StageRunner& runner, const PacketSpec& spec, const Exchange& exchange,
              int32_t own_rank = 0);

  void run(PacketStage stage) { runner_.run(stage, packets); }

  // The bytes of `sent`, `received` and `reduced`.
  std::vector<uint8_t> read(const uint8_t* bytes, int64_t count) const;
  void write(uint8_t* bytes, const std::vector<uint8_t>& values);

  // Sets the payload, with raw elements that their dtype holds.
  void set_payload(Values values);

  // Returns the payload that this rank's packet stands for. The payload itself stays.
  Values values_sent();

  // q_local of all matrices, by the numbers of the elements in the payload. The others are 0.
  Values q_local() const;
  void set_q_local(const Values& values);

  // Every group of the factors.
  std::vector<PacketGroup> groups() const;
  // The raw elements of a payload.
  Values raw_of(const Values& values) const;
  int64_t numel() const { return packets.raw_offset + raw_numel_ + spec.flags; }

  const PacketSpec spec;
  const Exchange exchange;
  kernels::Packets packets{};
  std::unique_ptr<DeviceArray> payload;

 private:
  void allocate(const kernels::PacketFactors& factors);

  StageRunner& runner_;
  std::vector<int64_t> q_offsets_;
  std::vector<std::unique_ptr<DeviceArray>> q_locals_;  // by matrix; none for P
  int64_t raw_numel_ = 0;
};

// All ranks of an exchange on one runner.
using AllPackets = std::vector<std::unique_ptr<TestPackets>>;
AllPackets all_packets(StageRunner& runner, const PacketSpec& spec, const Exchange& exchange);

// The collectives. `gather` gives every rank the packets of all. `scatter` gives each owner its
// chunk of every packet, and `collect` gives every rank the sums of all owners.
void gather(const AllPackets& all);
void scatter(const AllPackets& all);
void collect(const AllPackets& all);

// Runs the schedule after quantize.
void sum(const AllPackets& all);

}  // namespace powersgd::test

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "powersgd/core/hosts.h"

namespace powersgd {

// The collectives that sum a payload over the ranks.
enum class Schedule {
  kAllreduce,  // of the elements themselves, by the backend
  kOneShot,    // every rank gets all packets whole and adds them
  kTwoShot,    // every rank adds one chunk of all packets and sends the sum to all
};

// This rank's number, and how many ranks sum their payloads.
struct Ranks {
  int32_t own = 0;
  int32_t count = 1;
  // True if the backend's all-reduce is the best way to sum elements (NCCL). Otherwise (Gloo)
  // elements travel straight to the ranks that add them, as packets do.
  bool backend_sums = true;
  std::optional<Schedule> schedule = {};      // for tests; null: chosen by the bytes that are sent
  std::shared_ptr<const Levels> levels = {};  // null: payloads are summed in one level
};

// What the ranks of a host add before their sum leaves it. The elements are cut into one slice for
// each of them.
struct HostSum {
  std::shared_ptr<const Levels> levels;
  at::Tensor slices;  // all elements of the payload, the last slice padded
  at::Tensor terms;   // this rank's slice of every rank of the host
  at::Tensor slice;   // this rank's, in `slices`

  // Makes `slice` the sum of the terms, in the order of the ranks.
  void add();
};

// Purpose: a payload of one step, which the caller sums over the ranks by schedule():
//
//   all-reduce   all-reduce elements()
//   one-shot     quantize ; all-gather sent() to received() ; dequantize
//   two-shot     quantize ; all-to-all sent() to received() ; requantize ;
//                all-gather reduced() to gathered() ; dequantize
//
// elements() then holds the sum. Ranks send packets (powersgd/packets.h) if the wire rounds, and
// otherwise the elements themselves.
//
// If there is a host(), ranks sum in two levels, and schedule() is that of the second one:
//
//   within a host       all-to-all slices to terms ; add
//   across the hosts    sum the slice, by schedule()
//   within a host       all-gather slice to slices
//
// Contract: all ranks have equal schedules and equal sizes. Each buffer keeps its memory in every
// step, and no two overlap, so a message may arrive before the step asks for it. A single rank
// sends nothing: its received() is its sent().
//
// Ownership: the compressor owns it.
//
// Threads: those of its compressor.
class Payload {
 public:
  Payload() = default;
  virtual ~Payload() = default;
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;

  virtual Schedule schedule() const = 0;
  virtual HostSum* host() = 0;         // null: one level
  virtual at::Tensor& elements() = 0;  // in float32

  virtual at::Tensor& sent() = 0;
  virtual at::Tensor& received() = 0;
  virtual at::Tensor& reduced() = 0;
  virtual at::Tensor& gathered() = 0;
  virtual void quantize() = 0;
  virtual void requantize() = 0;
  virtual void dequantize() = 0;
};

// Sums the payload of a single rank, and returns the elements.
inline at::Tensor& sum_alone(Payload& payload) {
  if (payload.schedule() != Schedule::kAllreduce) {
    payload.quantize();
    payload.dequantize();
  }
  return payload.elements();
}

}  // namespace powersgd

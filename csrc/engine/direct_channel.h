// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace powersgd {

// The messages of an exchange that other ranks may send at any time from now on.
struct Mail {
  // What one collective receives.
  struct Round {
    at::Tensor output;   // of the collective: a row for each rank
    at::Tensor landing;  // where messages arrive: the output, or host memory in its place
    Members members;     // the ranks that send
    std::vector<c10::intrusive_ptr<c10d::Work>> receives;
  };
  int32_t tag = 0;  // of the first collective's messages; each further collective adds 1
  std::vector<Round> rounds;
};

// Purpose: runs the gathers and all-to-alls of one job as direct messages between all members at
// once, which take as long as one message, whatever their number. Messages of other jobs may
// be in flight too; tags tell them apart. An all-reduce is the backend's own, and has ended when it
// returns, so only a job that runs alone may have one.
//
// Posting a receive early makes its message faster: Gloo sends only once it knows that the receiver
// is ready, which takes the time of another message. So a job's receives can be posted when the
// previous job of the same exchange has ended: post_ahead(). A receive's memory must stay as long
// as its message may come: Gloo stops reading a connection whose next message has no place to go.
//
// Threads: one at a time, except that abort() may run during wait().
class DirectChannel final : public Channel {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  // `connect` returns the backend when a collective needs it. `mail` has a tag, and the receives
  // that are posted already.
  DirectChannel(std::function<BackendPtr()> connect, std::chrono::milliseconds timeout, Mail mail)
      : connect_(std::move(connect)), timeout_(timeout), mail_(std::move(mail)) {}

  void allreduce(at::Tensor& payload) override;
  void allgather(at::Tensor& output, at::Tensor& input, const Members* members) override;
  void alltoall(at::Tensor& output, at::Tensor& input, const Members* members) override;

  // True from the start of a collective until end().
  bool in_flight() const { return in_flight_; }
  // Waits until the collective's messages have been sent and received.
  void wait();
  // Makes wait() throw, now or later, if the backend can.
  void abort();
  // Completes the output.
  void end();

  // Posts the receives of the next job of this exchange, whose tag is `tag`. This channel must not
  // be used after that.
  Mail post_ahead(int32_t tag);

 private:
  const Mail::Round& begin_round(const at::Tensor& output, const Members* members);
  void post(Mail::Round& round, int32_t tag);
  void begin(const at::Tensor& output, const at::Tensor& input, const Members* members,
             bool scatters);
  Members all_ranks();
  c10d::Backend& backend();

  const std::function<BackendPtr()> connect_;
  const std::chrono::milliseconds timeout_;
  BackendPtr backend_;
  Mail mail_;
  size_t begun_ = 0;  // rounds
  bool in_flight_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> sends_;  // of the round in flight
  at::Tensor sent_;                                    // what they send
};

}  // namespace powersgd

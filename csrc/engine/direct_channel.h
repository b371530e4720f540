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
    std::vector<c10::intrusive_ptr<c10d::Work>> receives;
  };
  int32_t tag = 0;  // of the first collective's messages. The next one's is one more, and so on
  std::vector<Round> rounds;
};

// Purpose: gathers and all-to-alls of one job as messages that go straight from each rank to each
// other one, all at once. They take as long as one message, whatever the number of ranks. Those of
// other jobs may be on their way as well: tags tell them apart. An all-reduce is the backend's own,
// and has ended when it returns, so that only a job which runs alone may have one.
//
// A receive that is posted early spares its message a question: Gloo sends once it knows that the
// receiver is ready, which takes the time of another message. So the receives of a job can be
// posted when the job before it of the same exchange has ended: post_ahead().
//
// Threads: one at a time, and abort() beside wait().
class DirectChannel final : public Channel {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  // `connect` returns the backend when a collective needs it. `mail` has a tag, and what is posted.
  DirectChannel(std::function<BackendPtr()> connect, std::chrono::milliseconds timeout, Mail mail)
      : connect_(std::move(connect)), timeout_(timeout), mail_(std::move(mail)) {}

  void allreduce(at::Tensor& payload) override;
  void allgather(at::Tensor& output, at::Tensor& input) override;
  void alltoall(at::Tensor& output, at::Tensor& input) override;

  // True from the begin of a collective until end().
  bool in_flight() const { return in_flight_; }
  // Waits until the collective's messages have arrived and left.
  void wait();
  // Makes wait() throw, now or later, if the backend can.
  void abort();
  // Makes the output complete.
  void end();

  // Posts the receives of the next job of this exchange, whose tag is `tag`. This channel must not
  // be used after that.
  Mail post_ahead(int32_t tag);

 private:
  void begin_round(const at::Tensor& output);
  void post(Mail::Round& round, int32_t tag);
  void begin(const at::Tensor& output, const at::Tensor& input, bool scatters);
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

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace powersgd::test::fake_device {

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
using Operation = std::function<bool()>;  // returns false if it must run later

inline StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

// The rules by which CUDA captures streams into a graph. A stream that waits for a captured one is
// captured too. A captured stream must not wait for one that is not, nor the other way round, and
// every captured stream must have joined the first one by the end. Meanwhile the host may neither
// wait for the device nor ask it for anything: that makes the capture invalid, even if the error is
// caught.
class Capture {
 public:
  // The number of each stream's operations that a point of a stream comes after.
  using Clock = std::map<StreamKey, int64_t>;
  struct Event {
    uint64_t capture = 0;  // 0: recorded outside of any
    Clock after;
  };

  void begin(const c10::Stream& first) {
    first_ = key_of(first);
    streams_ = {{first_, {}}};
    graph_.clear();
    refused_.clear();
    ++current_;
  }

  void end() {
    const Clock reached = streams_.at(first_);
    for (auto& [key, clock] : streams_) {
      const auto found = reached.find(key);
      TORCH_CHECK(clock[key] == 0 || (found != reached.end() && found->second == clock[key]),
                  "stream ", key.second, " of the capture has not joined the first one");
    }
    streams_.clear();
    TORCH_CHECK(refused_.empty(), "the capture is invalid: ", refused_);
  }

  // Called where the host does what it may not do during a capture.
  void check_host(const char* what) {
    if (streams_.empty()) return;
    refused_ = what;
    TORCH_CHECK(false, what, " during a capture");
  }

  bool has(const c10::Stream& stream) const { return streams_.count(key_of(stream)) > 0; }

  void enqueued(const c10::Stream& stream, const Operation& operation) {
    if (!has(stream)) return;
    graph_.push_back(operation);
    ++streams_[key_of(stream)][key_of(stream)];
  }
  void recorded(const c10::Stream& stream, Event& event) const {
    event = has(stream) ? Event{current_, streams_.at(key_of(stream))} : Event();
  }
  void waits(const c10::Stream& stream, const Event& event) {
    if (event.capture == 0) {
      TORCH_CHECK(!has(stream), "a captured stream waits for one that is not");
      return;
    }
    TORCH_CHECK(!streams_.empty() && event.capture == current_,
                "a stream waits for an old capture");
    Clock& own = streams_[key_of(stream)];
    for (const auto& [key, count] : event.after) own[key] = std::max(own[key], count);
  }

  // In the order of enqueueing, which every stream admits.
  const std::vector<Operation>& graph() const { return graph_; }

 private:
  uint64_t current_ = 0;
  StreamKey first_;
  std::map<StreamKey, Clock> streams_;  // those that are being captured
  std::vector<Operation> graph_;
  std::string refused_;  // what the host did and may not do
};

}  // namespace powersgd::test::fake_device

// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/affine_job.h"
#include "engine/jobs.h"
#include "engine/stream_engine.h"
#include "fake_device/fake_device.h"
#include "ranks/two_equal_ranks.h"

// Jobs that a stream engine runs on the fake device.
namespace powersgd::test {

using Names = std::vector<std::string>;
constexpr unsigned kOrders = 200;

struct Group {
  c10::intrusive_ptr<StreamBackend> backend = c10::make_intrusive<StreamBackend>();
  StreamEngine engine{0, backend};

  WorkPtr submit(Job job) { return test::submit(engine, std::move(job), fake_device::device(0)); }
};

// Calls body(group) with a new group for each of many orders in which the device may run.
inline void in_many_orders(const std::function<void(Group&)>& body) {
  for (unsigned seed = 0; seed < kOrders; ++seed) {
    SCOPED_TRACE("order " + std::to_string(seed));
    fake_device::reset(seed, fake_device::Host::kMayNotWait);
    Group group;
    body(group);
  }
}

// Jobs of a pass, of 1, 2, ... elements. After a job is submitted, the caller's stream takes a
// while to fill the next one.
class Pass {
 public:
  explicit Pass(size_t jobs, std::vector<c10::DeviceIndex> devices = {0}) {
    for (size_t i = 0; i < jobs; ++i) {
      jobs_.push_back(std::make_unique<AffineJob>(fake_device::device(devices[i % devices.size()]),
                                                  static_cast<int64_t>(i + 1)));
    }
  }

  void submit(Engine& engine, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      for (int k = 0; k < 10; ++k) fake_device::enqueue(jobs_[i]->tensor().device(), [] {});
      jobs_[i]->fill(static_cast<float>(i));
      works_.push_back(jobs_[i]->submit(engine, /*more_follow=*/i + 1 < jobs_.size()));
    }
  }
  void submit(Engine& engine) { submit(engine, jobs_.size()); }

  // Waits for all Works, lets the device run, and compares the results of the jobs.
  void expect_results() {
    std::vector<std::shared_ptr<float>> seen;
    for (size_t i = 0; i < works_.size(); ++i) {
      works_[i]->wait();
      seen.push_back(jobs_[i]->read());
    }
    fake_device::run();
    for (size_t i = 0; i < works_.size(); ++i) {
      EXPECT_EQ(*seen[i], 4 * static_cast<float>(i) + 2) << "job " << i;
    }
  }

  const std::vector<WorkPtr>& works() const { return works_; }

 private:
  std::vector<std::unique_ptr<AffineJob>> jobs_;
  std::vector<WorkPtr> works_;
};

// A job whose parts note when the device runs them.
inline Job noted(const std::string& name, Names& ran, bool more_follow = true) {
  const auto note = [&ran](const std::string& what) {
    return [&ran, what](Channel&) {
      fake_device::enqueue(fake_device::device(0), [&ran, what] { ran.push_back(what); });
    };
  };
  Job job = job_of(note("project " + name), note("orthogonalize " + name));
  job.more_follow = more_follow;
  return job;
}

inline bool is_before(const Names& ran, const std::string& one, const std::string& other) {
  return std::find(ran.begin(), ran.end(), one) < std::find(ran.begin(), ran.end(), other);
}

}  // namespace powersgd::test

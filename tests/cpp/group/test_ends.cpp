// SPDX-License-Identifier: BSD-3-Clause
//
// A group that one thread ends while another uses it or ends it as well.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/thread_engine.h"
#include "fake_device/fake_device.h"
#include "group/sessions.h"
#include "powersgd/group/backend.h"
#include "powersgd/group/stats.h"
#include "support/errors.h"
#include "support/hook_defaults.h"

namespace powersgd {
namespace {

namespace fake = test::fake_device;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// One owner of a group of two equal ranks, and of a model that is attached in it.
struct Owner {
  c10::intrusive_ptr<BackendPowerSGD> backend;
  std::shared_ptr<BucketReducer> model;
  std::vector<at::Tensor> parameters;
  std::vector<WorkPtr> works;

  explicit Owner(c10::Device device) {
    backend = c10::make_intrusive<BackendPowerSGD>(
        0, 2, std::vector{test::inner_of_equal_ranks(device, device.is_cpu())},
        test::compressing(2));
    parameters = test::zeros({{24, 32}, {24, 32}, {24, 32}}, device);
    model = test::attach(backend->session(), parameters);
  }

  // Reduces the buckets of a backward pass.
  void submit() {
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor bucket = at::ones({24 * 32}, parameters[i].device());
      works.push_back(model->reduce(i, bucket, {i}, 2, /*more_follow=*/i + 1 < parameters.size()));
    }
  }

  void leave() {
    backend.reset();
    model.reset();
  }
};

// A use of a group. One thread at a time may train.
struct Act {
  const char* name;
  std::function<void(Owner&)> run;
  bool trains = false;
};

const std::vector<Act>& acts() {
  static const std::vector<Act> all = {
      {"abort", [](Owner& owner) { owner.backend->abort(); }},
      {"shutdown", [](Owner& owner) { owner.backend->shutdown(); }},
      {"destruction", [](Owner& owner) { owner.leave(); }},
      {"exit", [](Owner&) { shutdown_all_engines(); }},
      {"submit", [](Owner& owner) { owner.submit(); }, /*trains=*/true},
      {"state_dict", [](Owner& owner) { owner.model->states()->export_state(); }, /*trains=*/true},
      {"layers", [](Owner& owner) { owner.model->states()->layers(); }, /*trains=*/true},
      {"end of a step", [](Owner& owner) { owner.model->end_step(); }, /*trains=*/true},
      {"questions",
       [](Owner& owner) {
         Session& session = *owner.backend->session();
         session.compressing();
         session.starts_at();
         session.not_started();
         session.reset_stats(*session.stats());
         owner.model->compressing();
         owner.model->not_started();
         owner.model->reset_stats();
       }},
      {"loss scale", [](Owner& owner) { owner.model->states()->set_grad_scale(2); },
       /*trains=*/true},
      {"detach", [](Owner& owner) { owner.model->detach(); }, /*trains=*/true},
      {"stats", [](Owner& owner) { owner.backend->session()->snapshot(); }},
      {"wait", [](Owner& owner) {
         for (const WorkPtr& work : owner.works) work->wait();
       }}};
  return all;
}

// Nothing fails but by the end of the group.
void expect_result_or_end(const std::string& error) {
  EXPECT_TRUE(error == "no error" || test::contains(error, "shut down or aborted")) << error;
}

void act(const Act& act, Owner& owner) {
  expect_result_or_end(test::error_of([&] { act.run(owner); }));
  owner.leave();
}

// Steps are in flight when both threads begin. The group is gone when both have ended.
void run_pair(const Act& one, const Act& other, c10::Device device) {
  Owner first(device);
  first.submit();
  Owner second = first;
  test::run_both([&] { act(one, first); }, [&] { act(other, second); });
  for (const Owner& owner : {first, second}) {
    for (const WorkPtr& work : owner.works) {
      expect_result_or_end(test::error_of([&] { work->wait(); }));
      work->getFuture()->wait();
      EXPECT_TRUE(work->getFuture()->completed());
    }
  }
}

void run_all_pairs(c10::Device device) {
  for (const Act& one : acts()) {
    for (const Act& other : acts()) {
      if (one.trains && other.trains) continue;
      SCOPED_TRACE(std::string(one.name) + " and then " + other.name);
      fake::reset(0, fake::Host::kMayWait);
      run_pair(one, other, device);
    }
  }
}

TEST(Ends, EveryPairOfActsOnThreads) { run_all_pairs(at::kCPU); }

TEST(Ends, EveryPairOfActsOnStreams) {
  fake::add_operators();
  run_all_pairs(fake::device(0));
}

}  // namespace
}  // namespace powersgd

// SPDX-License-Identifier: BSD-3-Clause
#include "engine/channels.h"

#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/jobs.h"
#include "engine/thread_engine.h"
#include "ranks/two_equal_ranks.h"
#include "support/errors.h"
#include "support/recording_backend.h"

namespace powersgd {
namespace {

using std::chrono::milliseconds;
using test::contains;
using test::error_of;
using test::RecordingBackend;

// Connects to two recording backends when it is let go, as ranks do that wait for each other.
struct Rendezvous {
  c10::intrusive_ptr<RecordingBackend> p = c10::make_intrusive<RecordingBackend>();
  c10::intrusive_ptr<RecordingBackend> q = c10::make_intrusive<RecordingBackend>();
  std::vector<std::optional<milliseconds>> timeouts;  // of the calls
  std::promise<void> reached, end;

  Channels::Connect connect() {
    return [this](std::optional<milliseconds> timeout) {
      timeouts.push_back(timeout);
      reached.set_value();
      end.get_future().wait();
      return Channels::Pair{p, q};
    };
  }
};

test::WorkPtr submit_without_collective(Engine& engine) {
  return test::submit(engine, job_alone([](Channel&) {}));
}

test::WorkPtr submit_sum(Engine& engine) {
  return test::submit(engine, job_alone([](Channel& channel) {
                        at::Tensor payload = at::ones({3});
                        channel.allreduce(payload);
                      }));
}

TEST(Channels, ConnectOnceAtTheFirstUse) {
  Rendezvous rendezvous;
  rendezvous.end.set_value();
  Channels channels(rendezvous.connect());
  EXPECT_TRUE(rendezvous.timeouts.empty());
  EXPECT_EQ(&channels.at(1), rendezvous.q.get());
  EXPECT_EQ(&channels.at(0), rendezvous.p.get());
  EXPECT_EQ(rendezvous.timeouts, std::vector<std::optional<milliseconds>>{std::nullopt});
}

TEST(Channels, ATimeoutIsThatOfTheConnectionAndOfTheChannels) {
  Rendezvous rendezvous;
  Channels channels(rendezvous.connect());
  channels.set_timeout(milliseconds(7));
  auto connected = std::async(std::launch::async, [&] { channels.at(0); });
  rendezvous.reached.get_future().wait();
  channels.set_timeout(milliseconds(8));  // does not wait for the connection
  channels.each([](c10d::Backend&) { FAIL() << "not connected yet"; });
  EXPECT_TRUE(rendezvous.p->calls.empty());
  rendezvous.end.set_value();
  connected.get();
  channels.set_timeout(milliseconds(9));
  EXPECT_EQ(rendezvous.timeouts, std::vector<std::optional<milliseconds>>{milliseconds(7)});
  for (const auto& channel : {rendezvous.p, rendezvous.q}) {
    const std::vector<RecordingBackend::Call> expected = {{"setTimeout", {8}}, {"setTimeout", {9}}};
    EXPECT_EQ(channel->calls, expected);
  }
}

TEST(Channels, AFailureToConnectIsTheErrorOfEveryUse) {
  int calls = 0;
  Channels channels([&](auto&&) -> Channels::Pair {
    ++calls;
    throw std::runtime_error("rank 1 is not there");
  });
  for (int i = 0; i < 2; ++i) {
    const std::string error = error_of([&] { channels.at(0); });
    EXPECT_TRUE(contains(error, "could not connect for compressed steps: rank 1 is not there"))
        << error;
  }
  EXPECT_EQ(calls, 1);
}

TEST(Channels, AJobWithoutACollectiveConnectsNothing) {
  const auto backend = c10::make_intrusive<test::HostBackend>();
  int connections = 0;
  const auto connect = [&](auto&&) {
    ++connections;
    return Channels::Pair{backend, backend};
  };
  for (const bool ahead : {false, true}) {
    connections = 0;
    ThreadEngine engine(0, std::make_shared<Channels>(connect));
    submit_without_collective(engine)->wait();
    EXPECT_EQ(connections, 0);
    if (ahead) engine.connect(at::kCPU);
    submit_without_collective(engine)->wait();
    EXPECT_EQ(connections, ahead ? 1 : 0);
    submit_sum(engine)->wait();
    EXPECT_EQ(connections, 1);
  }
}

TEST(Channels, AnEndWhileTheyConnectDoesNotWaitAndFailsTheStep) {
  for (auto end : {&Engine::shutdown, &Engine::abort}) {
    Rendezvous rendezvous;
    ThreadEngine engine(0, std::make_shared<Channels>(rendezvous.connect()), test::kShort);
    const auto connecting = submit_sum(engine), queued = submit_sum(engine);
    rendezvous.reached.get_future().wait();
    (engine.*end)();
    EXPECT_TRUE(contains(error_of([&] { queued->wait(); }), "shut down or aborted"));
    EXPECT_FALSE(connecting->isCompleted());
    rendezvous.end.set_value();
    EXPECT_TRUE(contains(error_of([&] { connecting->wait(); }), "shut down or aborted"));
    EXPECT_TRUE(rendezvous.q->calls.empty());
  }
}

}  // namespace
}  // namespace powersgd

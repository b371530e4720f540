// SPDX-License-Identifier: BSD-3-Clause
#include "engine/connection.h"

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

// Connects to a recording backend when it is let go, as ranks do that wait for each other.
struct Rendezvous {
  c10::intrusive_ptr<RecordingBackend> backend = c10::make_intrusive<RecordingBackend>();
  std::vector<std::optional<milliseconds>> timeouts;  // of the calls
  std::promise<void> reached, end;

  Connection::Connect connect() {
    return [this](std::optional<milliseconds> timeout) {
      timeouts.push_back(timeout);
      reached.set_value();
      end.get_future().wait();
      return backend;
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

TEST(Connection, IsMadeAtTheFirstUse) {
  Rendezvous rendezvous;
  rendezvous.end.set_value();
  Connection connection(rendezvous.connect());
  EXPECT_TRUE(rendezvous.timeouts.empty());
  for (int use = 0; use < 2; ++use) EXPECT_EQ(connection.backend(), rendezvous.backend);
  EXPECT_EQ(rendezvous.timeouts, std::vector<std::optional<milliseconds>>{std::nullopt});
}

TEST(Connection, ATimeoutIsThatOfConnectingAndOfTheBackend) {
  Rendezvous rendezvous;
  Connection connection(rendezvous.connect());
  connection.set_timeout(milliseconds(7));
  auto connected = std::async(std::launch::async, [&] { connection.backend(); });
  rendezvous.reached.get_future().wait();
  connection.set_timeout(milliseconds(8));  // does not wait until it is connected
  connection.if_connected([](c10d::Backend&) { FAIL() << "not connected yet"; });
  EXPECT_TRUE(rendezvous.backend->calls.empty());
  rendezvous.end.set_value();
  connected.get();
  connection.set_timeout(milliseconds(9));
  EXPECT_EQ(rendezvous.timeouts, std::vector<std::optional<milliseconds>>{milliseconds(7)});
  const std::vector<RecordingBackend::Call> expected = {{"setTimeout", {8}}, {"setTimeout", {9}}};
  EXPECT_EQ(rendezvous.backend->calls, expected);
}

TEST(Connection, AFailureToConnectIsTheErrorOfEveryUse) {
  int calls = 0;
  Connection connection([&](auto&&) -> Connection::BackendPtr {
    ++calls;
    throw std::runtime_error("rank 1 is not there");
  });
  for (int i = 0; i < 2; ++i) {
    const std::string error = error_of([&] { connection.backend(); });
    EXPECT_TRUE(
        contains(error, "could not connect the ranks for compressed steps: rank 1 is not there"))
        << error;
  }
  EXPECT_EQ(calls, 1);
}

TEST(Connection, AJobWithoutACollectiveConnectsNothing) {
  const auto backend = c10::make_intrusive<test::HostBackend>();
  int connections = 0;
  const auto connect = [&](auto&&) {
    ++connections;
    return backend;
  };
  for (const bool ahead : {false, true}) {
    connections = 0;
    ThreadEngine engine(0, std::make_shared<Connection>(connect));
    submit_without_collective(engine)->wait();
    EXPECT_EQ(connections, 0);
    if (ahead) engine.connect(at::kCPU);
    submit_without_collective(engine)->wait();
    EXPECT_EQ(connections, ahead ? 1 : 0);
    submit_sum(engine)->wait();
    EXPECT_EQ(connections, 1);
  }
}

TEST(Connection, AnEndWhileItIsMadeDoesNotWaitAndFailsTheStep) {
  for (auto end : {&Engine::shutdown, &Engine::abort}) {
    Rendezvous rendezvous;
    ThreadEngine engine(0, std::make_shared<Connection>(rendezvous.connect()), test::kShort);
    const auto connecting = submit_sum(engine), queued = submit_sum(engine);
    rendezvous.reached.get_future().wait();
    (engine.*end)();
    EXPECT_TRUE(contains(error_of([&] { queued->wait(); }), "shut down or aborted"));
    EXPECT_FALSE(connecting->isCompleted());
    rendezvous.end.set_value();
    EXPECT_TRUE(contains(error_of([&] { connecting->wait(); }), "shut down or aborted"));
    EXPECT_TRUE(rendezvous.backend->calls.empty());
  }
}

}  // namespace
}  // namespace powersgd

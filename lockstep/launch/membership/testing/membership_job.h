#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/coordinator.h>
#include <lockstep/launch/membership/membership.h>

namespace lockstep::launch::membership_test {

inline AgentId id(uint8_t number) {
  return {number};
}

/// A coordinator, its clock, and agents that do what they are told at once.
class Job {
 public:
  explicit Job(const MembershipOptions& options) : coordinator(options, {1}, id(0), now) {}

  /// Another process is the agent of that host, and knows nothing yet.
  void replace(uint8_t number) {
    coordinator.disconnected(statuses_[number].id);
    statuses_[number] = {};
    ++lives_[number];
  }
  AgentId id_of(uint8_t number) { return {number, lives_[number]}; }
  /// What this agent says next.
  Status& say(uint8_t number) {
    Status& status = statuses_[number];
    status.id = id_of(number);
    status.host = "node-" + std::to_string(number);
    return status;
  }
  void hear(uint8_t number) {
    Status& status = say(number);
    status.sent_at = ++sent_;
    status.answers = coordinator.order_for(status.id).question;
    EXPECT_TRUE(coordinator.receive(status, now));
  }
  /// Those agents carry their orders out, and say so.
  void obey(std::initializer_list<uint8_t> numbers) {
    for (const uint8_t number : numbers) {
      const Order order = coordinator.order_for(id_of(number));
      Status& status = say(number);
      status.order = order.number;
      if (order.command == Command::kRun && status.generation != order.place.generation) {
        status.phase = HostPhase::kRunning;
        status.generation = order.place.generation;
      } else if (order.command != Command::kRun && status.phase == HostPhase::kRunning) {
        status.phase = HostPhase::kIdle;
      }
      hear(number);
    }
  }
  void set(uint8_t number, HostPhase phase) {
    say(number).phase = phase;
    hear(number);
  }
  /// Time passes, and these are heard all the while.
  void pass(std::chrono::nanoseconds duration, std::initializer_list<uint8_t> numbers) {
    for (const BootTime until = now + duration; now < until;) {
      now = std::min(until, now + std::chrono::seconds(1));
      for (const uint8_t number : numbers) hear(number);
    }
  }
  /// Workers have failed: the coordinator asks the other hosts, and these answer.
  void answer(std::initializer_list<uint8_t> numbers) {
    EXPECT_TRUE(decide_once().asks);
    for (const uint8_t number : numbers) hear(number);
  }
  MembershipDecision decide_once() { return coordinator.advance(now); }

  BootTime now{std::chrono::seconds(1000)};
  Coordinator coordinator;

 private:
  std::map<uint8_t, Status> statuses_;
  std::map<uint8_t, uint8_t> lives_;
  int64_t sent_ = 0;
};

inline MembershipOptions options(int min_hosts, int max_hosts, int max_restarts = 0) {
  MembershipOptions result;
  result.min_hosts = min_hosts;
  result.max_hosts = max_hosts;
  result.max_restarts = max_restarts;
  return result;
}

/// Hosts 0 to `hosts` - 1 run generation 1.
inline Job running_job(const MembershipOptions& chosen, uint8_t hosts) {
  Job job(chosen);
  for (uint8_t i = 0; i < hosts; ++i) job.hear(i);
  for (std::chrono::seconds passed(0); hosts < chosen.max_hosts && passed <= chosen.last_call;
       passed += std::chrono::seconds(1)) {
    job.now += std::chrono::seconds(1);
    for (uint8_t i = 0; i < hosts; ++i) job.hear(i);
  }
  EXPECT_EQ(job.decide_once().action, MembershipDecision::Action::kStart);
  for (uint8_t i = 0; i < hosts; ++i) job.obey({i});
  EXPECT_EQ(job.decide_once().action, MembershipDecision::Action::kWait);
  return job;
}

}  // namespace lockstep::launch::membership_test

#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/lockstep.h>

#include "command_loop.h"
#include "soak_board.h"
#include "soak_calls.h"
#include "soak_plan.h"

/// One rank's life in one round of the soak.
namespace lockstep::benchmarks {

/// The bytes of tensors, with all that lies in their storage, at the moment of the construction.
class Watch {
 public:
  /// `overwrite`: fills them with a pattern first, so that a late write shows even where it brings what is
  /// there.
  Watch(const std::vector<at::Tensor>& tensors, bool overwrite) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      const size_t bytes = tensor.storage().nbytes();
      auto* data = static_cast<std::byte*>(tensor.storage().mutable_data());
      if (overwrite) std::memset(data, kPattern, bytes);
      seen_.push_back({tensor, {data, data + bytes}});
    }
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& [tensor, before] : seen_) sum += static_cast<int64_t>(before.size());
    return sum;
  }
  int64_t changed() const {
    int64_t count = 0;
    for (const auto& [tensor, before] : seen_) {
      const auto* now = static_cast<const std::byte*>(tensor.storage().data());
      if (std::memcmp(now, before.data(), before.size()) == 0) continue;
      for (size_t i = 0; i < before.size(); ++i) count += now[i] != before[i] ? 1 : 0;
    }
    return count;
  }

 private:
  static constexpr int kPattern = 0x3C;
  std::vector<std::pair<at::Tensor, std::vector<std::byte>>> seen_;
};

/// What leaves the scope of the default group where the plan says so.
struct OutOfIdeas : std::runtime_error {
  OutOfIdeas() : std::runtime_error("out of ideas") {}
};

inline void spin(int64_t turns) {
  std::atomic<int64_t> left{turns};
  while (left.fetch_sub(1, std::memory_order_relaxed) > 0) {
  }
}

class SoakRank {
 public:
  SoakRank(const SoakPlan& plan, int rank, Board& board) : plan_(plan), rank_(rank), board_(board) {}

  /// Returns when the round is over for this rank. Throws OutOfIdeas where the plan says so.
  void play(const std::string& store) {
    at::set_num_threads(1);
    InitOptions options;
    options.timeout = std::chrono::seconds(60);
    options.rank = rank_;
    options.world_size = plan_.ranks;
    if (plan_.calls == Calls::kInit) return meet_again(options);
    if (plan_.host_of.empty()) {
      options.store = c10::make_intrusive<c10d::FileStore>(store, plan_.ranks);
    } else {
      options.init_method = store;
    }
    auto world = init_process_group(options);
    const auto groups = make_groups();
    std::deque<LaneState> lanes;  // whose addresses stay
    for (int lane = 0; lane < (plan_.has_member(rank_) ? plan_.lanes() : 0); ++lane) {
      const auto number = plan_.seed * 100 + static_cast<uint64_t>(lane);
      auto& state = lanes.emplace_back(
          LaneState{lane, groups[lane], Random(number), Random(number * 10 + static_cast<uint64_t>(rank_))});
      state.caller = make_caller(state);
    }
    barrier();
    if (!plan_.further_group) set_group_timeout(plan_.timeout());
    board_.ready[rank_] = true;
    if (!plan_.has_member(rank_)) return stand_by(groups[0]);
    std::thread outside;
    if (rank_ == plan_.victim && plan_.strikes_from_outside())
      outside = std::thread([&] { strike(groups[0]); });
    std::thread second;
    if (lanes.size() > 1) second = std::thread([&] { live(lanes[1]); });
    live(lanes[0]);
    if (second.joinable()) second.join();
    over_ = true;
    if (outside.joinable()) outside.join();
    if (plan_.goes_on() && board_.reports[rank_][0].error[0] != '\0') go_on();
  }

 private:
  struct LaneState {
    int number;
    ProcessGroup group;
    Random common;  // the same on all ranks
    Random local;   // this rank's
    std::unique_ptr<Caller> caller = {};
  };

  /// Meets the others again and again, until it can't.
  void meet_again(InitOptions options) {
    c10d::TCPStoreOptions client;
    client.port = static_cast<uint16_t>(board_.store_port.load());
    client.waitWorkers = false;
    options.store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client);
    const auto meet = [&] {
      const auto world = init_process_group(options);
      barrier();  // a rank that left at once would leave others within the meeting
    };
    meet();
    options.timeout = plan_.timeout();
    board_.ready[rank_] = true;
    std::thread outside;
    if (rank_ == plan_.victim) outside = std::thread([&] { strike({}); });
    Report& report = board_.reports[rank_][0];
    write_text(report.call, "init_process_group");
    try {
      for (int64_t made = 0;; ++made) {
        if (rank_ == plan_.victim) board_.made[0] = made;
        meet();
      }
    } catch (const c10::Error& thrown) {
      report.error_at = wall_clock();
      write_text(report.error, thrown.what_without_backtrace());
    }
    report.state = State::kFailed;
    while (!board_.compare) std::this_thread::sleep_for(std::chrono::microseconds(200));
    report.state = State::kCompared;
    over_ = true;
    if (outside.joinable()) outside.join();
  }

  /// The groups of the lanes; a rank that is not in them has one of its own.
  std::vector<ProcessGroup> make_groups() const {
    if (!plan_.further_group) return {default_group()};
    std::vector<ProcessGroup> groups;
    for (int lane = 0; lane < plan_.lanes(); ++lane)
      groups.push_back(new_group(plan_.members, plan_.timeout()));
    std::vector<int> rest;
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      if (!plan_.has_member(rank)) rest.push_back(rank);
    }
    if (rest.empty()) return groups;
    const ProcessGroup beside = new_group(rest);
    return plan_.has_member(rank_) ? groups : std::vector<ProcessGroup>{beside};
  }

  std::unique_ptr<Caller> make_caller(LaneState& state) const {
    const Lane lane{state.group, plan_.members, rank_};
    switch (plan_.calls) {
      case Calls::kMessages:
        return std::make_unique<MessageCaller>(plan_, lane, state.common, state.local);
      case Calls::kObjects:
        return std::make_unique<ObjectCaller>(plan_, lane, state.common);
      case Calls::kDdp:
        return std::make_unique<DdpCaller>(plan_, lane);
      case Calls::kNewGroup:
        return std::make_unique<GroupCaller>(lane, state.common);
      default:
        return std::make_unique<CollectiveCaller>(plan_, lane, state.common, state.local);
    }
  }

  /// A rank outside of the group goes on in one of its own, which nothing may happen to.
  void stand_by(const ProcessGroup& group) {
    Report& report = board_.reports[rank_][0];
    at::Tensor tensor = at::ones({1000});
    try {
      for (int i = 0; i < 20; ++i) all_reduce(tensor, ReduceOp::MAX, group);
      while (!board_.compare) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      all_reduce(tensor, ReduceOp::MAX, group);
      report.state = State::kPassed;
    } catch (const c10::Error& error) {
      report.error_at = wall_clock();
      write_text(report.error, error.what_without_backtrace());
      report.state = State::kFailed;
    }
  }

  /// In a thread of its own: what befalls the victim from outside of its calls.
  void strike(const ProcessGroup& group) {
    const auto lane = static_cast<size_t>(plan_.seed % static_cast<uint64_t>(plan_.lanes()));
    while (!board_.may_strike && !over_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    while (board_.made[lane] < plan_.steps && !over_) std::this_thread::yield();
    spin(plan_.spins);
    if (over_) return;
    for (auto& failed_at : board_.failed_at) failed_at = wall_clock();
    if (*plan_.failpoint != '\0') {
      const std::string kill = "=kill(9)";
      failpoint::configure(plan_.failpoint + kill + ";announce" + kill + "@20");  // some calls pass no other
      return;
    }
    if (plan_.failure == Failure::kQuickExit) ::_exit(4);
    if (plan_.ends_victim()) ::kill(::getpid(), SIGKILL);
    if (plan_.failure == Failure::kStop) ::kill(::getpid(), SIGSTOP);
    if (plan_.failure == Failure::kAbort) abort(plan_.calls == Calls::kThreads ? ProcessGroup() : group);
  }

  /// What the victim does itself instead of a further call. Returns when it has left the group.
  void fail(const LaneState& lane) {
    spin(plan_.spins);
    board_.failed_at[lane.number] = wall_clock();
    if (plan_.mismatches()) return lane.caller->mismatch(plan_.failure);
    if (plan_.failure == Failure::kDestroy) destroy_process_group(lane.group);
    if (plan_.failure == Failure::kException) throw OutOfIdeas();
    if (plan_.failure == Failure::kExit) std::exit(3);
    if (plan_.failure == Failure::kQuickExit) ::_exit(4);
  }

  /// Makes calls until one throws, or this rank has left, and reports.
  void live(LaneState& lane) {
    Report& report = board_.reports[rank_][lane.number];
    Caller& caller = *lane.caller;
    const bool victim = rank_ == plan_.victim;
    const bool from_inside = !plan_.strikes_from_outside();
    const bool message_mismatch = plan_.calls == Calls::kMessages && plan_.mismatches();
    std::string error;
    try {
      for (int64_t made = 0;; ++made) {
        if (from_inside && victim && made == plan_.steps) {
          fail(lane);
          if (plan_.failure == Failure::kDestroy) break;
        } else if (message_mismatch && made == plan_.steps) {
          caller.meet_mismatch();
        } else {
          if (victim) board_.made[lane.number] = made;
          caller.step();
        }
        if (message_mismatch && made == plan_.steps) break;  // only its receiver need see it: all go on
      }
    } catch (const c10::Error& thrown) {
      report.error_at = wall_clock();
      error = thrown.what_without_backtrace();
    }
    write_text(report.call, caller.last());
    write_text(report.error, error);
    std::vector<Watch> watched;
    if (!error.empty() || message_mismatch) {
      watched = look_back(lane, !error.empty());
    } else {
      // destroy_process_group() has finished this rank's calls: peers may write into their tensors no more.
      watched.emplace_back(caller.tensors(), plan_.overwrite);
    }
    for (const Watch& each : watched) report.watched += each.bytes();
    report.state = error.empty() ? State::kPassed : State::kFailed;
    while (!board_.compare) std::this_thread::sleep_for(std::chrono::microseconds(200));
    for (const Watch& each : watched) report.changed += each.changed();
    report.state = State::kCompared;
  }

  /// After an error: watches the tensors, and does what a program may do then.
  std::vector<Watch> look_back(LaneState& lane, bool failed) {
    std::vector<Watch> watched;
    if (failed) {
      const auto tensors = lane.caller->tensors();
      watched.emplace_back(tensors, plan_.overwrite);
      // New ones, for memory that a late peer may still write must not have been given out again.
      std::vector<at::Tensor> fresh;
      for (const at::Tensor& tensor : tensors) {
        if (plan_.memory == Memory::kPlain || !tensor.defined()) continue;
        fresh.push_back(empty_shared({static_cast<int64_t>(tensor.nbytes())}, at::kByte, lane.group));
      }
      watched.emplace_back(fresh, true);
    }
    auto& again = board_.reports[rank_][lane.number].again;
    const int64_t next = plan_.goes_on() ? 0 : draw(lane.local, 0, 2);
    // Where a message fails the group does not, and its other members wait for this rank in the next barrier.
    if (plan_.calls == Calls::kMessages || plan_.calls == Calls::kObjects || next == 0) {
      try {
        lane.caller->again(lane.group);
        write_text(again, kSucceeded);
      } catch (const c10::Error& thrown) {
        write_text(again, thrown.what_without_backtrace());
      }
    } else if (next == 1 && plan_.lanes() == 1) {
      destroy_process_group(lane.group);
    }
    return watched;
  }

  /// Trains some steps in the group of those that are left.
  void go_on() {
    Sequel& sequel = board_.sequels[rank_];
    try {
      shrink_group();
      at::Tensor weights = at::zeros({10'000});
      for (int step = 1; step <= 20; ++step) {
        at::Tensor gradients = at::arange(10'000, at::kFloat).mul_(0.001 * (rank_ + step)).sin_();
        all_reduce(gradients, ReduceOp::AVG);
        weights.sub_(gradients, 0.1);
      }
      barrier();
      sequel.bits = 0xcbf29ce484222325;  // FNV-1a
      const auto* bytes = static_cast<const unsigned char*>(weights.const_data_ptr());
      for (size_t i = 0; i < weights.nbytes(); ++i) sequel.bits = (sequel.bits ^ bytes[i]) * 0x100000001b3;
      sequel.size = get_world_size();
    } catch (const c10::Error& thrown) {
      write_text(sequel.error, thrown.what_without_backtrace());
    }
    sequel.done = true;
  }

  const SoakPlan& plan_;
  int rank_;
  Board& board_;
  std::atomic<bool> over_{false};
};

}  // namespace lockstep::benchmarks

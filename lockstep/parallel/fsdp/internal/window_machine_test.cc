#include <array>
#include <deque>
#include <gmock/gmock.h>
#include <set>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/fsdp/internal/window_machine.h>

namespace lockstep::fsdp::internal::window_machine_test {
namespace {

using ::testing::HasSubstr;

constexpr int kRowsOfARank = 2;
constexpr int kMostRanks = 4;

/// What a meeting of all ranks is to them: it succeeds on all or on none. Ranks may meet the second time before the last
/// one has gone from the first.
enum class Outcome : char { kOpen, kSucceeded, kFailed };
struct Meeting {
  std::array<bool, kMostRanks> arrived{};
  std::array<bool, kMostRanks> gone{};
  Outcome outcome = Outcome::kOpen;
};

struct Rank {
  WindowMachine machine;
  int meetings = 0;    // that it has gone to
  bool waits = false;  // in the last of them
  int next_row = -1;   // of its own to write; -1: it does not write
  int reading = -1;    // the next row to read; -1: it does not read
  int64_t seen = -1;   // the version that the rows had so far
  int reads_left = 0;  // before the next step
  bool dead = false;
};

/// Ranks, the rows' versions, and all meetings. Everything that may happen next is a move.
struct World {
  int ranks;
  int steps;
  bool with_deaths;
  std::vector<Rank> rank;
  std::vector<int64_t> rows;
  std::vector<Meeting> meetings;

  World(int ranks_, int steps_, int reads, bool with_deaths_)
      : ranks(ranks_),
        steps(steps_),
        with_deaths(with_deaths_),
        rank(static_cast<size_t>(ranks_)),
        rows(static_cast<size_t>(ranks_ * kRowsOfARank), 0),
        meetings(static_cast<size_t>(2 * steps_)) {
    for (auto& each : rank) each.reads_left = reads;
  }

  std::string key() const {
    std::string text;
    const auto put = [&](int64_t value) { text += std::to_string(value) + ","; };
    for (const Rank& each : rank) {
      put(static_cast<int>(each.machine.phase())), put(static_cast<int64_t>(each.machine.steps()));
      put(each.machine.readers()), put(each.meetings), put(each.waits), put(each.next_row), put(each.reading);
      put(each.seen), put(each.reads_left), put(each.dead);
    }
    for (const int64_t row : rows) put(row);
    for (const Meeting& meeting : meetings) {
      for (int i = 0; i < ranks; ++i) put(meeting.arrived[i]), put(meeting.gone[i]);
      put(static_cast<int>(meeting.outcome));
    }
    return text;
  }

  void arrive(Rank& each, int index) {
    meetings[static_cast<size_t>(each.meetings)].arrived[static_cast<size_t>(index)] = true;
    each.waits = true;
  }

  /// The moves of one rank, each done in a copy.
  void add_moves(int index, std::vector<World>& next) const {
    const Rank& now = rank[static_cast<size_t>(index)];
    if (now.dead) return;
    const auto move = [&](auto&& change) {
      World world = *this;
      change(world, world.rank[static_cast<size_t>(index)]);
      next.push_back(std::move(world));
    };
    if (with_deaths) {
      bool others_live = true;
      for (const Rank& other : rank) others_live = others_live && !other.dead;
      if (others_live) move([](World&, Rank& each) { each.dead = true; });
    }
    const WindowPhase phase = now.machine.phase();
    if (now.waits) {
      const Meeting& meeting = meetings[static_cast<size_t>(now.meetings)];
      if (meeting.outcome == Outcome::kOpen) return;
      move([&](World& world, Rank& each) {
        Meeting& met = world.meetings[static_cast<size_t>(each.meetings)];
        met.gone[static_cast<size_t>(index)] = true;
        each.waits = false;
        ++each.meetings;
        if (met.outcome == Outcome::kFailed) return each.machine.fail();
        if (phase == WindowPhase::kEntering) {
          each.machine.all_have_entered();
          each.next_row = 0;
        } else {
          each.machine.all_have_left();
          each.reads_left = 1;
        }
      });
    } else if (phase == WindowPhase::kWriting) {
      move([&](World& world, Rank& each) {
        world.rows[static_cast<size_t>(index * kRowsOfARank + each.next_row)] += 1;
        if (++each.next_row < kRowsOfARank) return;
        each.next_row = -1;
        each.machine.leave();
        world.arrive(each, index);
      });
    } else if (phase == WindowPhase::kReading && now.reading >= 0) {
      move([&](World& world, Rank& each) {
        const int64_t version = world.rows[static_cast<size_t>(each.reading)];
        ASSERT_TRUE(each.seen < 0 || each.seen == version) << "a torn read of rank " << index;
        ASSERT_EQ(version, static_cast<int64_t>(each.machine.steps()))
            << "rank " << index << " reads another step's row";
        each.seen = version;
        if (++each.reading < static_cast<int>(world.rows.size())) return;
        each.reading = each.seen = -1;
        each.machine.end_read();
      });
    } else if (phase == WindowPhase::kReading) {
      if (now.reads_left > 0) {
        move([](World&, Rank& each) {
          --each.reads_left;
          each.machine.begin_read();
          each.reading = 0;
        });
      }
      // A group that has failed has no further operation.
      bool failed = false;
      for (const Meeting& meeting : meetings) failed = failed || meeting.outcome == Outcome::kFailed;
      if (static_cast<int>(now.machine.steps()) < steps && !failed) {
        move([&](World& world, Rank& each) {
          each.machine.enter();
          world.arrive(each, index);
        });
      }
    }
  }

  /// A meeting at which all are succeeds, or fails if it can; one that misses a dead rank fails.
  void add_outcomes(std::vector<World>& next) const {
    for (size_t i = 0; i < meetings.size(); ++i) {
      if (meetings[i].outcome != Outcome::kOpen) continue;
      bool all = true, any = false, missing = false;
      for (int r = 0; r < ranks; ++r) {
        const bool here = meetings[i].arrived[static_cast<size_t>(r)];
        all = all && here;
        any = any || here;
        missing = missing || (!here && rank[static_cast<size_t>(r)].dead);
      }
      const auto decide = [&](Outcome outcome) {
        World world = *this;
        world.meetings[i].outcome = outcome;
        next.push_back(std::move(world));
      };
      if (all) decide(Outcome::kSucceeded);
      if ((all && with_deaths) || (any && missing)) decide(Outcome::kFailed);
    }
  }

  void check() const {
    for (int i = 0; i < ranks; ++i) {
      const Rank& each = rank[static_cast<size_t>(i)];
      if (each.dead || each.machine.phase() != WindowPhase::kReading) continue;
      for (const int64_t row : rows) {
        ASSERT_EQ(row, static_cast<int64_t>(each.machine.steps()))
            << "rank " << i << " may read, but the weights are not those of its step";
      }
    }
  }

  /// Nothing moves any more: have all living ranks come to an end?
  void check_end() const {
    for (const Rank& each : rank) {
      if (each.dead) continue;
      const bool finished =
          each.machine.phase() == WindowPhase::kBroken || each.machine.phase() == WindowPhase::kReading;
      ASSERT_TRUE(finished && !each.waits)
          << "it waits for ever, " << to_string(each.machine.phase()) << ": " << key();
      if (!with_deaths) {
        ASSERT_EQ(static_cast<int>(each.machine.steps()), steps);
      }
    }
  }
};

/// Goes through all states that can be reached.
size_t explore(const World& first) {
  std::set<std::string> known{first.key()};
  std::deque<World> open{first};
  while (!open.empty()) {
    const World world = std::move(open.front());
    open.pop_front();
    world.check();
    std::vector<World> next;
    for (int i = 0; i < world.ranks; ++i) world.add_moves(i, next);
    world.add_outcomes(next);
    if (next.empty()) world.check_end();
    if (::testing::Test::HasFatalFailure()) return known.size();
    for (World& each : next) {
      if (known.insert(each.key()).second) open.push_back(std::move(each));
    }
  }
  return known.size();
}

TEST(WindowMachine, NoInterleavingOfTwoRanksTearsARead) {
  EXPECT_GT(explore(World(2, 4, 3, /*with_deaths=*/false)), 1000U);
}

TEST(WindowMachine, NoInterleavingOfThreeRanksTearsARead) {
  EXPECT_GT(explore(World(3, 3, 2, /*with_deaths=*/false)), 10000U);
}

// Weights of one step, or a rank that knows they are not: also when a rank dies at any moment, and when meetings fail.
TEST(WindowMachine, NoRankReadsBrokenWeights) {
  EXPECT_GT(explore(World(3, 2, 1, /*with_deaths=*/true)), 10000U);
}

TEST(WindowMachine, RefusesWhatWouldTear) {
  const auto message = [](auto&& action) -> std::string {
    try {
      action();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "nothing";
  };
  WindowMachine machine;
  machine.begin_read();
  EXPECT_THAT(message([&] { machine.enter(); }), HasSubstr("while a forward, backward"));
  machine.begin_read();
  machine.end_read(), machine.end_read();
  machine.enter();
  EXPECT_THAT(message([&] { machine.begin_read(); }), HasSubstr("while step() writes"));
  EXPECT_THAT(message([&] { machine.enter(); }), HasSubstr("step() within step()"));
  machine.fail();
  EXPECT_EQ(machine.phase(), WindowPhase::kReading) << "no rank has written";
  machine.enter(), machine.all_have_entered();
  machine.fail();
  EXPECT_THAT(message([&] { machine.begin_read(); }), HasSubstr("load a checkpoint"));
  EXPECT_THAT(message([&] { machine.enter(); }), HasSubstr("load a checkpoint"));
}

}  // namespace
}  // namespace lockstep::fsdp::internal::window_machine_test

#include <array>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/transport/host/groups/operation_outcome.h>

// Every order of the protocol's steps: what ranks announce, decide and commit, when one of them dies, gives
// up at its timeout or aborts the group, and what they do in the next operation. The ranks here do by single
// steps what HostChannel does in its waits, with the protocol's own class and words.
namespace lockstep::transport::operation_outcome_test {
namespace {

using Phase = OperationOutcome::Phase;

struct Size {
  int ranks;
  int operations;
  int waits;  // of each operation: 1 as a small one has, 2 as one with an announcement and a final flag
};

enum class At : uint8_t {
  kBegin,    // looks whether the group has failed
  kSet,      // sets its flag for the next wait
  kLook,     // at all flags
  kJudge,    // has not found all flags set: looks at the decision, and why it may give up
  kOutcome,  // in the protocol
  kEnded,    // all operations succeeded, or one failed
  kDead,
};

struct Rank {
  At at = At::kBegin;
  int operation = 1;
  int wait = 0;
  int flags = 0;                          // waits for which its flag is set, over all operations
  int succeeded = 0;                      // operations
  int failed = 0;                         // the first one that failed
  std::vector<OperationOutcome> outcome;  // none or one
};

/// The words as values.
struct Words {
  uint64_t proposal = 0;
  uint64_t decision = 0;
  uint64_t abort = 0;
};

struct State {
  Words words;
  std::array<Rank, 3> ranks;
};

class Explorer {
 public:
  explicit Explorer(const Size& size) : size_(size) {}

  void run() {
    std::vector<State> open{State{}};
    seen_.insert(key(open.back()));
    while (!open.empty() && !::testing::Test::HasFailure()) {
      const State state = std::move(open.back());
      open.pop_back();
      for (int rank = 0; rank < size_.ranks; ++rank) {
        for (State& next : steps_of(state, rank)) {
          check(next);
          if (seen_.insert(key(next)).second) open.push_back(std::move(next));
        }
      }
    }
  }
  size_t states() const { return seen_.size(); }
  bool saw_success_for_all() const { return all_succeeded_; }
  bool saw_a_contest() const { return contested_; }

 private:
  bool alive(const Rank& rank) const { return rank.at != At::kDead; }

  bool complete(const State& state, const Rank& own) const {
    for (int rank = 0; rank < size_.ranks; ++rank) {
      if (state.ranks[rank].flags < flag_of(own)) return false;
    }
    return true;
  }
  int flag_of(const Rank& own) const { return (own.operation - 1) * size_.waits + own.wait + 1; }

  // One outcome for all states: its values are those of the state whose step is taken.
  void put(const Words& words) {
    words_.proposal = words.proposal;
    words_.decision = words.decision;
    words_.abort = words.abort;
  }
  Words take() const {
    Decision decided = outcome::decision(words_);
    decided.by = 0;  // which rank it was makes no difference to what follows
    return {words_.proposal, decided.sequence == 0 ? 0 : pack_decision(decided), words_.abort};
  }

  static void fail(Rank& own) {
    own.at = At::kEnded;
    own.failed = own.operation;
  }
  void go_on(Rank& own) const {
    own.at = At::kSet;
    if (++own.wait < size_.waits) return;
    own.outcome.assign(1, OperationOutcome(words_, 0, static_cast<uint64_t>(own.operation)));
    own.outcome[0].see_all();
    own.at = At::kOutcome;
  }
  void give_up(Rank& own) const {
    own.outcome.assign(1, OperationOutcome(words_, 0, static_cast<uint64_t>(own.operation)));
    own.outcome[0].give_up(FailureKind::kTimeout, 0);
    own.at = At::kOutcome;
  }

  /// The states that one step of this rank may lead to.
  std::vector<State> steps_of(const State& state, int index) {
    std::vector<State> next;
    const Rank& before = state.ranks[index];
    if (before.at == At::kEnded || before.at == At::kDead) return next;
    const auto branch = [&]() -> State& { return next.emplace_back(state); };

    bool anyone_dead = false;
    for (const Rank& rank : state.ranks) anyone_dead |= !alive(rank);
    if (!anyone_dead) {
      Rank& own = branch().ranks[index];
      own.at = At::kDead;
      own.outcome.clear();
    }
    if (state.words.abort == 0) branch().words.abort = 1;  // by another thread of this rank
    if (before.at != At::kBegin && state.words.abort == 0 && !anyone_dead) {
      // By an error of its own, without a word on the operation: it aborts the group, and takes part in
      // nothing more.
      State& to = branch();
      to.words.abort = 1;
      to.ranks[index].at = At::kDead;
      to.ranks[index].outcome.clear();
    }

    put(state.words);
    const auto sequence = static_cast<uint64_t>(before.operation);
    switch (before.at) {
      case At::kBegin: {
        State& to = branch();
        Rank& own = to.ranks[index];
        if (outcome::decision(words_).is_failure() || state.words.abort != 0) {
          if (state.words.abort != 0)
            outcome::decide(words_, {sequence, static_cast<uint64_t>(FailureKind::kTimeout), 0, 0});
          to.words = take();
          fail(own);
        } else {
          own.at = At::kSet;
        }
        break;
      }
      case At::kSet: {
        Rank& own = branch().ranks[index];
        own.flags = flag_of(own);
        own.at = At::kLook;
        break;
      }
      case At::kLook: {
        Rank& own = branch().ranks[index];
        if (complete(state, own)) {
          go_on(own);
        } else {
          own.at = At::kJudge;
        }
        break;
      }
      case At::kJudge: {
        const Decision decided = outcome::decision(words_);
        if (outcome::has_failed(words_, sequence)) {
          fail(branch().ranks[index]);
        } else {
          if (decided.is_failure()) {
            EXPECT_TRUE(complete(state, before)) << "a later operation failed before this one had succeeded";
          }
          branch().ranks[index].at = At::kLook;
          give_up(branch().ranks[index]);  // at any time: timeout, abort, the end of a peer
        }
        break;
      }
      case At::kOutcome: {
        State& to = branch();
        Rank& own = to.ranks[index];
        OperationOutcome& outcome = own.outcome[0];
        outcome.step([&] { return complete(state, own); });
        to.words = take();
        contested_ |= outcome.phase() == Phase::kContested || outcome.phase() == Phase::kOverruled;
        if (outcome.is_stepping()) break;
        const Phase phase = outcome.phase();
        own.outcome.clear();
        if (phase == Phase::kFailed) {
          fail(own);
        } else if (phase == Phase::kSucceeded) {
          own.succeeded = own.operation++;
          own.wait = 0;
          own.at = own.operation > size_.operations ? At::kEnded : At::kBegin;
        } else {
          EXPECT_TRUE(complete(state, own)) << "a rank goes on from a wait that is not over";
          go_on(own);
        }
        break;
      }
      case At::kEnded:
      case At::kDead:
        break;
    }
    return next;
  }

  void check(const State& state) {
    int most = 0;
    bool all = true;
    for (int rank = 0; rank < size_.ranks; ++rank) {
      most = std::max(most, state.ranks[rank].succeeded);
      all &= state.ranks[rank].succeeded == size_.operations;
    }
    all_succeeded_ |= all;
    for (int rank = 0; rank < size_.ranks; ++rank) {
      const int failed = state.ranks[rank].failed;
      EXPECT_TRUE(failed == 0 || failed > most)
          << "operation " << failed << " failed on rank " << rank << ", and another rank has succeeded in it";
    }
  }

  uint64_t key(const State& state) const {
    uint64_t key = 0;
    const auto add = [&](uint64_t value, int bits) {
      EXPECT_LT(value, uint64_t{1} << bits);
      key = key << bits | value;
    };
    for (int index = 0; index < size_.ranks; ++index) {
      const Rank& rank = state.ranks[index];
      add(static_cast<uint64_t>(rank.at), 3);
      add(static_cast<uint64_t>(rank.operation), 3);
      add(static_cast<uint64_t>(rank.wait), 2);
      add(static_cast<uint64_t>(rank.flags), 3);
      add(rank.failed != 0, 1);
      add(rank.outcome.empty() ? 15 : static_cast<uint64_t>(rank.outcome[0].phase()), 4);
    }
    const Decision decided = unpack_decision(state.words.decision);
    add(state.words.proposal, 2);
    add(decided.sequence, 2);
    add(decided.is_failure(), 1);
    add(state.words.abort, 1);
    return key;
  }

  const Size size_;
  mutable layout::OutcomeWords words_{};
  std::unordered_set<uint64_t> seen_;
  bool all_succeeded_ = false;
  bool contested_ = false;
};

class OperationOutcomeOrders : public ::testing::TestWithParam<Size> {};

TEST_P(OperationOutcomeOrders, SucceedOnAllRanksOrOnNone) {
  const Size size = GetParam();
  Explorer explorer(size);
  explorer.run();
  EXPECT_TRUE(explorer.saw_success_for_all());
  EXPECT_TRUE(explorer.saw_a_contest());
  EXPECT_GT(explorer.states(), 1000u);
}

INSTANTIATE_TEST_SUITE_P(Sizes, OperationOutcomeOrders,
                         ::testing::Values(Size{2, 3, 1}, Size{2, 3, 2}, Size{3, 2, 1}, Size{3, 2, 2},
                                           Size{3, 3, 1}),
                         [](const auto& info) {
                           return std::to_string(info.param.ranks) + "Ranks" +
                                  std::to_string(info.param.operations) + "Operations" +
                                  std::to_string(info.param.waits) + "Waits";
                         });

}  // namespace
}  // namespace lockstep::transport::operation_outcome_test

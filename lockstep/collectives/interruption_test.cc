#include <atomic>
#include <fstream>
#include <gmock/gmock.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/errors.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/testing/operation_stream.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// Every kind of waiting is ended by abort() and by the timeout, and every pair of operations that don't
// belong together is explained to all ranks, before any tensor is written.
namespace lockstep::interruption_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using testing::Case;
using testing::GuardedTensor;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Operation;
using testing::operations;
using testing::Place;
using testing::Random;
using testing::run_ranks;

/// A case of the operation with tensors too large to travel in the announcement.
Case large_case(const Operation& operation, int ranks) {
  Case c;
  c.operation = &operation;
  c.seed = 5;
  c.ranks = ranks;
  c.parts.assign(operation.traits.coalesced ? 2 : 1, {60, 50});
  c.rows.assign(static_cast<size_t>(ranks), std::vector<int64_t>(static_cast<size_t>(ranks), 500));
  c.peer = ranks - 1;
  return c;
}

Place place_in(const ProcessGroup& group) {
  std::vector<int> members;
  for (int rank = 0; rank < get_world_size(group); ++rank) members.push_back(rank);
  return {get_rank(group), group, members, {}};
}

/// One way to wait in which rank 0 needs rank 1.
struct Waiting {
  std::string name;
  std::function<void(const ProcessGroup&)> wait;
};

/// Rank 0 alone makes the call of the case.
void wait_in(const Operation& operation, const ProcessGroup& group, int root, bool asynchronous) {
  Case c = large_case(operation, get_world_size(group));
  c.root = root;
  c.asynchronous = asynchronous;
  Random local(1);
  const Place place = place_in(group);
  const auto tensors = testing::make_tensors(place, c, local);
  const auto started = testing::start(place, c, tensors);
  for (const Work& work : started.works) work->wait();
}

std::vector<Waiting> all_kinds_of_waiting() {
  std::vector<Waiting> all;
  for (const Operation& operation : operations()) {
    if (std::string(operation.name) == "send and recv") continue;  // below, in more forms
    for (bool asynchronous : {false, true}) {
      for (int root : {0, 1}) {
        if (root == 1 && !operation.traits.rooted) continue;
        all.push_back({operation.name + std::string(asynchronous ? ", asynchronous" : "") +
                           (operation.traits.rooted ? ", root " + std::to_string(root) : ""),
                       [&operation, root, asynchronous](const ProcessGroup& group) {
                         wait_in(operation, group, root, asynchronous);
                       }});
      }
    }
  }
  const auto large = [] { return at::ones({1'000'000}); };
  all.push_back({"send", [=](const ProcessGroup& group) { send(large(), 1, group); }});
  all.push_back({"send from shared memory",
                 [=](const ProcessGroup& group) { send(empty_shared({1'000'000}).fill_(1), 1, group); }});
  all.push_back({"isend", [=](const ProcessGroup& group) { isend(large(), 1, group)->wait(); }});
  all.push_back({"recv", [=](const ProcessGroup& group) { recv(large(), 1, group); }});
  all.push_back(
      {"recv of a small message", [](const ProcessGroup& group) { recv(at::ones({1}), 1, group); }});
  all.push_back({"irecv", [=](const ProcessGroup& group) { irecv(large(), 1, group)->wait(); }});
  all.push_back({"recv from any source", [=](const ProcessGroup& group) { recv(large(), {}, group); }});
  all.push_back(
      {"irecv from any source", [=](const ProcessGroup& group) { irecv(large(), {}, group)->wait(); }});
  return all;
}

/// Whether a thread of this process sleeps.
bool sleeps(pid_t thread) {
  std::ifstream stat("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(stat, text);
  const size_t name_end = text.rfind(") ");
  return name_end != std::string::npos && text[name_end + 2] == 'S';
}

enum class Aborter { kSelf, kPeer };
class AbortEnds : public ::testing::TestWithParam<Aborter> {};

TEST_P(AbortEnds, EveryKindOfWaiting) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const Waiting& waiting : all_kinds_of_waiting()) {
      SCOPED_TRACE(waiting.name);
      auto group = new_group();
      const bool peer_aborts = GetParam() == Aborter::kPeer;
      if (rank == 0) {
        std::atomic<pid_t> waiter{0};
        std::jthread aborter([&] {
          // Once it really waits, as far as that can be seen; the outcome is the same at any other moment.
          const auto patience = Deadline::after(2s);
          while (waiter == 0 || (!sleeps(waiter) && !patience.expired())) std::this_thread::yield();
          if (peer_aborts) {
            send(at::ones({1}), 1);  // in the default group: now is the time
          } else {
            abort(group);
          }
        });
        waiter = static_cast<pid_t>(::syscall(SYS_gettid));
        const auto text = message_of([&] { waiting.wait(group); });
        EXPECT_THAT(text, HasSubstr(peer_aborts ? "aborted by rank 1" : "aborted by rank 0"));
      } else if (peer_aborts) {
        recv(at::ones({1}), 0);
        abort(group);
      }
      barrier();  // the default group is not touched
      EXPECT_THAT(message_of([&] { barrier(group); }), HasSubstr("aborted by rank")) << "later operations";
      destroy_process_group(group);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(By, AbortEnds, ::testing::Values(Aborter::kSelf, Aborter::kPeer),
                         [](const auto& info) { return info.param == Aborter::kSelf ? "Self" : "Peer"; });

TEST(Timeout, EndsEveryKindOfWaitingAndNamesWhoIsMissing) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const Waiting& waiting : all_kinds_of_waiting()) {
      SCOPED_TRACE(waiting.name);
      auto group = new_group();
      group->getBackend(at::kCPU)->setTimeout(60ms);  // of operations, not of making the group
      if (rank == 0) {
        const auto text = message_of<DistTimeoutError>([&] { waiting.wait(group); });
        EXPECT_THAT(text, HasSubstr("rank 1"));
        // Less where an earlier step of the operation has taken some of it.
        EXPECT_THAT(text, ::testing::ContainsRegex("after (0\\.0|[1-6]?[0-9] ms)")) << "how long it waited";
      }
      barrier();
      destroy_process_group(group);
    }
  });
}

// ---- Calls that don't belong together.

/// Two ranks' calls of one operation that differ in one thing.
struct Difference {
  const char* name;
  bool (*applies)(const Operation& operation);
  void (*spoil)(Case& c);
};

const std::vector<Difference>& differences() {
  static const std::vector<Difference> kDifferences = {
      {"dtype", [](const Operation& o) { return o.traits.tensors; }, [](Case& c) { c.dtype = at::kInt; }},
      {"number of elements",
       [](const Operation& o) { return o.traits.tensors && !o.traits.sparse && !o.traits.splits; },
       [](Case& c) {
         c.parts.back() = {60, 51};
       }},
      {"small and large",
       [](const Operation& o) { return o.traits.tensors && !o.traits.sparse && !o.traits.splits; },
       [](Case& c) { c.parts.back() = {3}; }},
      {"splits", [](const Operation& o) { return o.traits.splits; },
       [](Case& c) {
         for (auto& from : c.rows) from.assign(from.size(), 499);
       }},
      {"number of tensors", [](const Operation& o) { return o.traits.coalesced; },
       [](Case& c) { c.parts.push_back({7}); }},
      {"root", [](const Operation& o) { return o.traits.rooted; }, [](Case& c) { c.root = 1; }},
      {"reduce operation", [](const Operation& o) { return o.traits.reduces; },
       [](Case& c) { c.reduction = ReduceOp::MAX; }},
  };
  return kDifferences;
}

/// The name that messages have for an operation.
std::string name_in_messages(const Operation& operation) {
  return operation.traits.sparse ? "all_reduce" : operation.name;
}

/// Rank 0 makes one call, the last rank the other; all are told both, and nothing was written.
void expect_explained(const Case& one, const Case& other) {
  SCOPED_TRACE(one.describe() + "\nagainst " + other.describe());
  auto group = new_group();
  const Place place = place_in(group);
  const int last = get_world_size(group) - 1;
  const Case& mine = place.rank == last ? other : one;
  Random local(static_cast<uint64_t>(place.rank));
  const auto tensors = testing::make_tensors(place, mine, local);
  const auto text = message_of([&] {
    const auto started = testing::start(place, mine, tensors);
    for (const Work& work : started.works) work->wait();
  });
  EXPECT_THAT(text, HasSubstr("rank " + std::to_string(last)));
  EXPECT_THAT(text, AnyOf(HasSubstr("rank 0"), HasSubstr("ranks 0")));
  EXPECT_THAT(text, HasSubstr(name_in_messages(*one.operation)));
  EXPECT_THAT(text, HasSubstr(name_in_messages(*other.operation)));
  for (const GuardedTensor& each : tensors) EXPECT_FALSE(each.changed());
  destroy_process_group(group);
}

bool is_collective(const Operation& operation) {
  return !operation.traits.point_to_point;
}

TEST(Mismatch, EveryPairOfOperationsIsExplained) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    for (const Operation& one : operations()) {
      for (const Operation& other : operations()) {
        if (&one == &other || !is_collective(one) || !is_collective(other)) continue;
        expect_explained(large_case(one, 2), large_case(other, 2));
      }
    }
  });
}

TEST(Mismatch, EveryDifferenceWithinAnOperationIsExplained) {
  for (int ranks : {2, 5}) {
    run_ranks(ranks, [ranks](int) {
      auto world = init_process_group();
      for (const Operation& operation : operations()) {
        if (!is_collective(operation)) continue;
        for (const Difference& difference : differences()) {
          if (!difference.applies(operation)) continue;
          SCOPED_TRACE(difference.name);
          const Case one = large_case(operation, ranks);
          Case other = one;
          difference.spoil(other);
          expect_explained(one, other);
        }
      }
    });
  }
}

TEST(Mismatch, ShapesAreComparedTooIfEveryDetailIs) {
  for (bool detail : {false, true}) {
    const std::optional<std::string> level = detail ? std::optional<std::string>("DETAIL") : std::nullopt;
    run_ranks(2,
              [detail](int rank) {
                auto world = init_process_group();
                at::Tensor tensor = at::arange(6, at::kFloat).view({rank + 2, 3 - rank});
                const at::Tensor before = tensor.clone();
                if (detail) {
                  const auto text = message_of([&] { all_reduce(tensor); });
                  EXPECT_THAT(text, HasSubstr("[2, 3]"));
                  EXPECT_THAT(text, HasSubstr("[3, 2]"));
                  EXPECT_TRUE(at::equal(tensor, before));
                } else {
                  all_reduce(tensor);  // as in PyTorch
                  EXPECT_TRUE(at::equal(tensor, 2 * before));
                }
              },
              {.environment = {{"TORCH_DISTRIBUTED_DEBUG", level}}});
  }
}

TEST(Mismatch, PremulSumAgainstSumIsExplainedAndFactorsMayDiffer) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = at::full({3}, rank + 1.0f);
    all_reduce(tensor, premul_sum(rank == 0 ? 2.0 : 10.0));
    EXPECT_TRUE(at::equal(tensor, at::full({3}, 22.0f)));
    const auto text =
        message_of([&] { all_reduce(tensor, rank == 0 ? premul_sum(2.0) : ReduceOp(ReduceOp::SUM)); });
    EXPECT_THAT(text, HasSubstr("PREMUL_SUM"));
    EXPECT_TRUE(at::equal(tensor, at::full({3}, 22.0f)));
  });
}

}  // namespace
}  // namespace lockstep::interruption_test

#include <algorithm>
#include <exception>

#include <ATen/ops/empty.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/doctor/internal/exercise.h>
#include <lockstep/doctor/internal/known_values.h>
#include <lockstep/doctor/internal/median.h>
#include <lockstep/doctor/internal/wire_test.h>
#include <lockstep/doctor/job_probe.h>
#include <lockstep/transport/host/host_transport.h>

namespace lockstep::doctor {

using namespace internal;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLatencyRounds = 51;
constexpr int kTransferRounds = 7;
constexpr int kClockRounds = 5;
constexpr int64_t kTransferElements = 262144;  // 1 MiB

/// Stands before each operation of two ranks: a failpoint, "PREFIX_A_B", and the end of the time for new ones.
class StepGuard {
 public:
  StepGuard(const std::string& prefix, const Pair& pair, Deadline limit)
      : pair_(pair),
        limit_(limit),
        failpoint_(prefix + std::to_string(pair.first) + "_" + std::to_string(pair.second)) {}

  void begin_step() const {
    failpoint::here(failpoint_);
    if (limit_.expired()) {
      LOCKSTEP_THROW_TIMEOUT("the test of ranks " + std::to_string(pair_.first) + " and " +
                             std::to_string(pair_.second) + " took too long");
    }
  }

 private:
  Pair pair_;
  Deadline limit_;
  std::string failpoint_;
};

/// One pair's test; `limit` bounds the time in which new operations are begun.
class PairTest {
 public:
  PairTest(const Pair& pair, int rank, ProcessGroup group, Deadline limit)
      : pair_(pair), rank_(rank), group_(std::move(group)), guard_("doctor_pair_", pair, limit) {}

  void check_values() {
    const std::vector<int> members = {pair_.first, pair_.second};
    for (int64_t numel : kExerciseSizes) {
      for (TensorMemory memory : {TensorMemory::kStaged, TensorMemory::kArena}) {
        guard_.begin_step();
        exercise_collectives(numel, memory, members, rank_, members, group_);
      }
      guard_.begin_step();
      exercise_messages(numel, rank_, rank_ == pair_.first ? pair_.second : pair_.first, group_);
    }
  }

  /// Median of seconds for an all_reduce of so many elements; the first fifth of the rounds warms up.
  double time_all_reduce(int64_t numel, int rounds) {
    const at::Tensor tensor = at::empty({numel}, at::kFloat);
    std::vector<double> seconds;
    for (int round = -rounds / 5; round < rounds; ++round) {
      fill_contribution(tensor, rank_);  // fresh data, and no overflow
      const auto begin = Clock::now();
      guard_.begin_step();
      all_reduce(tensor, ReduceOp::SUM, group_);
      if (round >= 0) seconds.push_back(to_seconds(Clock::now() - begin));
    }
    return median(std::move(seconds));
  }

 private:
  Pair pair_;
  int rank_;
  ProcessGroup group_;
  StepGuard guard_;
};

}  // namespace

std::vector<std::vector<Pair>> tournament(int world_size) {
  const int players = world_size + world_size % 2;  // with an odd number, one rests each round
  std::vector<std::vector<Pair>> rounds;
  for (int round = 0; round + 1 < players; ++round) {
    const auto player_at = [&](int place) {
      return place == 0 ? 0 : 1 + (place - 1 + round) % (players - 1);
    };
    std::vector<Pair>& pairs = rounds.emplace_back();
    for (int place = 0; place < players / 2; ++place) {
      const int a = player_at(place);
      const int b = player_at(players - 1 - place);
      if (std::max(a, b) < world_size) pairs.emplace_back(std::min(a, b), std::max(a, b));
    }
    std::sort(pairs.begin(), pairs.end());
    if (pairs.empty()) rounds.pop_back();  // of one rank
  }
  return rounds;
}

LockstepProbe::LockstepProbe(World world, std::chrono::milliseconds timeout)
    : world_(std::move(world)), timeout_(timeout) {}

LockstepProbe::~LockstepProbe() = default;

void LockstepProbe::join() {
  // Nothing else is done in this step, so it may take as long as two operations.
  // Without the store at hand, as a program does it: where the ranks meet says which interface serves other hosts.
  group_ = std::make_unique<DefaultGroup>(init_process_group({.timeout = 2 * timeout_}));
  set_group_timeout(timeout_);
}

void LockstepProbe::test_all() {
  failpoint::here("doctor_all");
  std::vector<int> roots = {0};
  if (world_.world_size > 1) roots.push_back(world_.world_size - 1);
  for (int64_t numel : kExerciseSizes) {
    for (TensorMemory memory : {TensorMemory::kStaged, TensorMemory::kArena}) {
      exercise_collectives(numel, memory, all_ranks(world_.world_size), world_.rank, roots, {});
    }
  }
}

double LockstepProbe::clock_offset() {
  const at::Tensor mine = at::empty({1}, at::kLong);
  const at::Tensor all = at::empty({world_.world_size}, at::kLong);
  std::vector<double> offsets;
  for (int round = 0; round < kClockRounds; ++round) {
    barrier();  // all leave it at almost the same moment
    *mine.data_ptr<int64_t>() = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                    std::chrono::system_clock::now().time_since_epoch())
                                    .count();
    all_gather_into_tensor(all, mine);
    const auto* clocks = all.const_data_ptr<int64_t>();
    offsets.push_back(1e-9 * static_cast<double>(clocks[world_.rank] - clocks[0]));
  }
  return median(std::move(offsets));
}

PairMeasurement LockstepProbe::test_pairs(const std::vector<Pair>& pairs) {
  for (const Pair& pair : pairs) {
    if (pair.first == world_.rank || pair.second == world_.rank) return test_pair(pair);
  }
  return {};
}

std::string LockstepProbe::in_group_of(const Pair& pair,
                                       const std::function<void(const ProcessGroup&, Deadline limit)>& test) {
  std::string failure;
  ProcessGroup group;
  try {
    const Deadline limit = Deadline::after(timeout_);
    group = new_group({pair.first, pair.second}, timeout_, {.use_local_synchronization = true});
    test(group, limit);
  } catch (const std::exception& error) {
    failure = text_of(error);
  }
  if (!group) return failure;
  try {
    destroy_process_group(group);
  } catch (const std::exception& error) {
    if (failure.empty()) failure = text_of(error);
  }
  return failure;
}

PairMeasurement LockstepProbe::test_pair(const Pair& pair) {
  PairMeasurement result;
  result.error = in_group_of(pair, [&](const ProcessGroup& group, Deadline limit) {
    PairTest test(pair, world_.rank, group, limit);
    test.check_values();
    result.latency = test.time_all_reduce(1, kLatencyRounds);
    result.transfer = test.time_all_reduce(kTransferElements, kTransferRounds);
  });
  return result;
}

WireMeasurement LockstepProbe::test_wires(const std::vector<Pair>& pairs) {
  for (const Pair& pair : pairs) {
    if (pair.first == world_.rank || pair.second == world_.rank) return test_wire(pair);
  }
  return {};
}

WireMeasurement LockstepProbe::test_wire(const Pair& pair) {
  WireMeasurement result;
  const int peer = world_.rank == pair.first ? pair.second : pair.first;
  const std::string failure = in_group_of(pair, [&](const ProcessGroup& group, Deadline limit) {
    const StepGuard guard("doctor_wire_", pair, limit);
    result = measure_wire(group, world_.rank, peer, [&] { guard.begin_step(); });
  });
  result.error = failure;
  return result;
}

std::string LockstepProbe::wire() {
  const auto backend =
      c10::dynamic_intrusive_pointer_cast<LockstepBackend>(default_group()->getBackend(c10::kCPU));
  if (!backend || !backend->spans_hosts()) return "";
  return backend->channel().transport().wire().describe();
}

}  // namespace lockstep::doctor

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <numeric>
#include <set>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/algorithms/staging.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/collectives/testing/operation_stream.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/rank_server.h>
#include <lockstep/testing/temporary_folder.h>

// Random ranks are killed at random moments, during random operations of all kinds. Survivors must
// be told which rank it was, must never be told anything wrong, and go on: in groups without the killed
// ranks, and in a new world.
namespace lockstep::kill_test {
namespace {

namespace algorithms = collectives::internal::algorithms;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::OperationStream;
using testing::Random;
using testing::SharedFolder;

constexpr int kRanks = 8;  // each run kills all but one, one after the other

std::vector<std::string> lines_of(const char* file, const std::string& containing) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    if (line.find(containing) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

size_t entries_of(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

/// Our files in /dev/shm, but for the directory at which the processes of other programs' MPI jobs meet.
std::set<std::string> shared_files() {
  const std::string meeting_place = "lockstep-" + std::to_string(::geteuid());
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.find("lockstep") != std::string::npos && name != meeting_place) files.insert(name);
  }
  return files;
}

/// What a process holds that outlives groups if it is not released.
struct Holdings {
  size_t descriptors = entries_of("/proc/self/fd");
  size_t threads = entries_of("/proc/self/task");
  std::vector<std::string> shared_memory = lines_of("/proc/self/maps", "memfd:lockstep");
};

/// Ends this process after `operations` calls of the stream and a random while, from outside of the call that
/// it is in then.
class Killer {
 public:
  Killer(const OperationStream& stream, int operations, int64_t spins)
      : thread_([&stream, operations, spins] {
          while (stream.made() < operations) std::this_thread::yield();
          std::atomic<int64_t> left{spins};
          while (left.fetch_sub(1, std::memory_order_relaxed) > 0) {
          }
          testing::die();
        }) {
    thread_.detach();
  }

 private:
  std::thread thread_;
};

/// An error of a survivor must say which rank died and how.
void expect_names(const std::string& text, int victim, pid_t pid) {
  EXPECT_THAT(text, HasSubstr("rank " + std::to_string(victim) + " (pid " + std::to_string(pid) + ")"));
  EXPECT_THAT(text, HasSubstr("signal 9"));
  EXPECT_THAT(text, Not(HasSubstr("timed out")));
}

/// What one kill leaves a survivor with; the world of `ranks` processes is already there.
void survive(OperationStream& stream, int victim, pid_t pid, const ProcessGroup& survivors) {
  std::vector<std::string> errors;
  // Sends and receives may fail first, those with the dead one; the others go on until a collective fails.
  while (!stream.collective_failed()) {
    try {
      stream.step();
    } catch (const c10::DistBackendError& error) {
      errors.emplace_back(error.what_without_backtrace());
    }
  }
  for (auto& error : stream.finish_failed()) errors.push_back(std::move(error));
  // The group stays failed, with the same cause.
  try {
    barrier();
    ADD_FAILURE() << "a barrier with a dead rank succeeded";
  } catch (const c10::DistBackendError& error) {
    errors.emplace_back(error.what_without_backtrace());
  }
  for (const auto& error : errors) expect_names(error, victim, pid);

  // Each collective succeeded on all or on none; a group without the killed ranks goes on, and compares the
  // results.
  at::Tensor mine = at::full({1}, stream.succeeded(), at::kLong);
  at::Tensor all = at::empty({get_world_size(survivors)}, at::kLong);
  all_gather_into_tensor(all, mine, survivors);
  EXPECT_EQ(all.min().item<int64_t>(), all.max().item<int64_t>()) << "successes differ between survivors";
}

/// The order in which the ranks of a run die; the last one survives.
std::vector<int> order_of_death(uint64_t seed) {
  std::vector<int> order(kRanks);
  std::iota(order.begin(), order.end(), 0);
  Random random(seed);
  for (size_t i = order.size() - 1; i > 0; --i) {
    std::swap(order[i], order[static_cast<size_t>(testing::draw(random, 0, static_cast<int64_t>(i)))]);
  }
  return order;
}

/// One world, in which one rank dies.
void run_world(int process, std::vector<int> alive, int dying, uint64_t seed, const std::string& store_path) {
  const auto rank_of = [&](int which) {
    return static_cast<int>(std::find(alive.begin(), alive.end(), which) - alive.begin());
  };
  const int ranks = static_cast<int>(alive.size());
  const int rank = rank_of(process);
  const int victim = rank_of(dying);
  auto world = init_process_group({.timeout = 5min,
                                   .rank = rank,
                                   .world_size = ranks,
                                   .store = c10::make_intrusive<c10d::FileStore>(store_path, ranks)});
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  std::vector<int> others = members;
  others.erase(others.begin() + victim);
  const ProcessGroup survivors = new_group(others);
  const pid_t pid = all_gather_values(::getpid())[static_cast<size_t>(victim)];

  OperationStream stream({rank, default_group(), members, {}}, seed,
                         "LOCKSTEP_TEST_SEED=" + std::to_string(testing::test_seed()) + ", " +
                             std::to_string(ranks) + " ranks of which rank " + std::to_string(victim) +
                             " dies");
  if (rank != victim) {
    survive(stream, victim, pid, survivors);
    return;
  }
  Random random(seed + 1);
  const int operations = static_cast<int>(testing::draw(random, 0, 40));
  const int64_t spins = testing::draw(random, 0, 1) == 0 ? 0 : testing::draw(random, 0, 500'000);
  Killer killer(stream, operations, spins);
  while (true) stream.step();
}

/// A rank's life: world after world until it is its turn.
void live(int process, const std::vector<int>& order, uint64_t seed, const std::string& folder) {
  algorithms::set_chunk_bytes_for_testing(4096);
  std::optional<Holdings> first;
  for (size_t dead = 0; dead + 1 < order.size(); ++dead) {
    SCOPED_TRACE("after " + std::to_string(dead) + " deaths, seed " + std::to_string(seed));
    std::vector<int> alive(order.begin() + static_cast<std::ptrdiff_t>(dead), order.end());
    std::sort(alive.begin(), alive.end());
    run_world(process, alive, order[dead], seed * 100 + dead,
              folder + "/store-" + std::to_string(seed) + "-" + std::to_string(dead));
    // Nothing is left of the world that failed.
    const Holdings now;
    EXPECT_THAT(now.shared_memory, ::testing::IsEmpty());
    EXPECT_THAT(lines_of("/proc/self/maps", "/dev/shm/"), ::testing::IsEmpty());
    // Communication threads stay a while for the next group that needs one; one more for each world would be
    // seen.
    EXPECT_LE(now.threads, 5u);
    if (first) {
      EXPECT_EQ(now.descriptors, first->descriptors);
    }
    first = now;
  }
}

TEST(Kill, IsNamedToAllOthersWhoWereToldNothingWrongAndGoOn) {
  const uint64_t seed = testing::test_seed();
  const int runs = testing::long_run() ? 30 : 3;
  const SharedFolder folder;
  const auto files_before = shared_files();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // orphans of the ranks would become children of this process
  for (int run = 0; run < runs; ++run) {
    const uint64_t run_seed = seed * 1000 + static_cast<uint64_t>(run);
    const auto order = order_of_death(run_seed);
    auto environment = testing::seed_environment(seed);
    for (const auto& variable : folder.environment()) environment.push_back(variable);
    SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed) + ", run " + std::to_string(run));
    testing::run_survivors(kRanks, {order.begin(), order.end() - 1},
                           [&](int rank) { live(rank, order, run_seed, folder.path()); },
                           {.deadline = 100s, .environment = environment});
    if (SharedFolder::in_rank()) continue;  // in a rank of a later run
    testing::stop_rank_server();
    EXPECT_TRUE(::waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD) << "a process is left";
    if (HasFailure()) break;
  }
  EXPECT_EQ(shared_files(), files_before) << "in /dev/shm";
}

}  // namespace
}  // namespace lockstep::kill_test

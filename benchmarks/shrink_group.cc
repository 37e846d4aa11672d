// Times how long the survivors of a job need to go on as a smaller group after one rank was killed. By hand:
//
//     bench_shrink_group [SURVIVORS [RECOVERIES]]        (2 and 50 unless told)
//
// Each recovery is a job of its own: SURVIVORS + 1 processes train a while (an all_reduce of 1 MiB in shared
// memory), one of them kills itself in the midst, the others get the error, call shrink_group(), and
// all_reduce again. Printed are medians and the worst over all survivors and recoveries.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

namespace {

constexpr int kMostRanks = 64;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// What the processes of one recovery write down, each in its own place.
struct Notes {
  int64_t death = 0;
  std::array<int64_t, kMostRanks> noticed{};  // the failed operation has thrown
  std::array<int64_t, kMostRanks> shrunk{};   // shrink_group() has returned
  std::array<int64_t, kMostRanks> reduced{};  // the first all_reduce of the new group has returned
};

void live(int rank, int ranks, const std::string& store, Notes& notes) {
  auto world = lockstep::init_process_group(
      {.rank = rank, .world_size = ranks, .store = c10::make_intrusive<c10d::FileStore>(store, ranks)});
  at::Tensor gradients = lockstep::empty_shared({1 << 18}).fill_(1);
  constexpr int kSteps = 20;
  try {
    for (int step = 0;; ++step) {
      if (rank == step % ranks && step >= kSteps) {
        notes.death = now_ns();
        ::kill(::getpid(), SIGKILL);
      }
      lockstep::all_reduce(gradients, lockstep::ReduceOp::AVG);
    }
  } catch (const c10::DistBackendError&) {
    notes.noticed[rank] = now_ns();
  }
  lockstep::shrink_group();
  notes.shrunk[rank] = now_ns();
  lockstep::all_reduce(gradients, lockstep::ReduceOp::AVG);
  notes.reduced[rank] = now_ns();
  TORCH_CHECK(lockstep::get_world_size() == ranks - 1, "the group has ", lockstep::get_world_size(),
              " ranks");
}

/// One recovery in processes of its own.
void recover(int ranks, const std::string& store, Notes& notes) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    TORCH_CHECK(child >= 0, "fork failed");
    if (child == 0) {
      int status = 0;
      try {
        live(rank, ranks, store, notes);
      } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        status = 1;
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    failures += WIFEXITED(status) && WEXITSTATUS(status) != 0 ? 1 : 0;
  }
  TORCH_CHECK(failures == 0, failures, " survivors failed");
}

void print(const char* what, std::vector<int64_t> times) {
  std::sort(times.begin(), times.end());
  std::printf("%-44s %8.3f ms median, %8.3f ms worst\n", what,
              static_cast<double>(times[times.size() / 2]) / 1e6, static_cast<double>(times.back()) / 1e6);
}

}  // namespace

int main(int argc, char** argv) try {
  const int survivors = argc > 1 ? std::atoi(argv[1]) : 2;
  const int recoveries = argc > 2 ? std::atoi(argv[2]) : 50;
  TORCH_CHECK(survivors >= 1 && survivors < kMostRanks && recoveries >= 1,
              "usage: bench_shrink_group [SURVIVORS [RECOVERIES]]");
  void* shared = ::mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(shared != MAP_FAILED, "mmap failed");
  std::string folder = (std::filesystem::temp_directory_path() / "lockstep-shrink-XXXXXX").string();
  TORCH_CHECK(::mkdtemp(folder.data()) != nullptr, "mkdtemp failed");
  std::vector<int64_t> noticing, shrinking, in_all;
  for (int i = 0; i < recoveries; ++i) {
    auto* notes = new (shared) Notes;
    recover(survivors + 1, folder + "/store" + std::to_string(i), *notes);
    for (int rank = 0; rank <= survivors; ++rank) {
      if (notes->reduced[rank] == 0) continue;  // the dead one
      noticing.push_back(notes->noticed[rank] - notes->death);
      shrinking.push_back(notes->shrunk[rank] - notes->noticed[rank]);
      in_all.push_back(notes->reduced[rank] - notes->death);
    }
  }
  std::filesystem::remove_all(folder);
  std::printf("%d recoveries, %d survivors each\n", recoveries, survivors);
  print("from the death to the error", noticing);
  print("shrink_group()", shrinking);
  print("from the death to the first all_reduce done", in_all);
} catch (const std::exception& error) {
  std::cerr << "bench_shrink_group: " << error.what() << std::endl;
  return 1;
}

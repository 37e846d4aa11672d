#include <chrono>
#include <cstdlib>
#include <fstream>
#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// How groups make, keep and end the backend that they have for CUDA. A stand-in for liblockstep_cuda gives
// them one that only notes what it is told, so no card is needed; what NCCL does is in
// cuda/nccl_device_test.cc.
namespace lockstep::nccl_groups_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using testing::run_ranks_collect;

using Notes = std::vector<std::string>;

class StandInBackend final : public c10d::Backend {
 public:
  StandInBackend(int rank, int size, std::string name, Notes& notes)
      : Backend(rank, size), name_(std::move(name)), notes_(notes) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    note("timeout " + std::to_string(timeout.count()));
  }
  void abort() override { note("abort"); }
  void shutdown() override { note("shutdown"); }

 private:
  void note(const std::string& what) { notes_.push_back(name_ + ": " + what); }

  const std::string name_;
  Notes& notes_;
};

class StandInLibrary final : public CudaLibrary {
 public:
  std::string problem() override { return problem_; }
  int device_count() override { return 8; }
  std::string device_identity(int index) override { return "GPU-" + std::to_string(index); }
  std::string device_name(int) override { return "stand-in"; }
  std::string nccl_version() override { return "2.0.0"; }
  c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                      int size, const NcclGroup& group) override {
    TORCH_CHECK(!fails_, "this card is broken");
    EXPECT_EQ(store->add("members", 1) > size, false) << "these keys have been used before";
    notes_.push_back(group.name + ": " + std::to_string(rank) + " of " + std::to_string(size) + ", timeout " +
                     std::to_string(group.timeout.count()) + ", at most " +
                     std::to_string(group.options.max_ctas.value_or(-1)));
    return c10::make_intrusive<StandInBackend>(rank, size, group.name, notes_);
  }

  std::string problem_;
  bool fails_ = false;
  Notes notes_;
};

/// The stand-in, for this process.
StandInLibrary& library() {
  static auto& only = [&]() -> StandInLibrary& {
    auto* made = new StandInLibrary;
    cuda_loading::replace_library(made);
    return *made;
  }();
  return only;
}

Notes notes_of(const std::string& group) {
  Notes found;
  for (const std::string& note : library().notes_) {
    if (note.starts_with(group + ": ")) found.push_back(note.substr(group.size() + 2));
  }
  return found;
}

bool maps(const std::string& library) {
  std::ifstream file("/proc/self/maps");
  for (std::string line; std::getline(file, line);) {
    if (line.find(library) != std::string::npos) return true;
  }
  return false;
}

TEST(NcclGroups, AreNoReasonToLoadCudaForProgramsOnTheCpu) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    auto group = new_group();
    at::Tensor tensor = at::ones({4});
    all_reduce(tensor, ReduceOp::SUM, group);
    EXPECT_EQ(tensor[0].item<float>(), 2);
    get_default_backend_for_device(at::kCUDA);
    is_backend_available("nccl");
    EXPECT_TRUE(maps("libtorch_cpu.so"));
    EXPECT_FALSE(maps("libtorch_cuda.so"));
    EXPECT_FALSE(maps("liblockstep_cuda.so"));
  });
}

TEST(NcclGroups, HaveNcclForCudaAndLockstepForTheRest) {
  run_ranks(3, [](int rank) {
    library();
    {
      auto world = init_process_group({.backend = "nccl", .timeout = 50s, .nccl = {.max_ctas = 4}});
      EXPECT_EQ(get_backend(), "nccl");
      EXPECT_EQ(get_backend_config(), "cuda:nccl");
      EXPECT_EQ(default_group()->getBackend(at::kCUDA)->getBackendName(), "nccl");
      EXPECT_EQ(default_group()->getBackend(at::kCPU)->getBackendName(), "lockstep");
      EXPECT_THAT(notes_of("default"), ElementsAre(std::to_string(rank) + " of 3, timeout 50000, at most 4"));
      at::Tensor tensor = at::ones({2});
      all_reduce(tensor);
      EXPECT_EQ(tensor[0].item<float>(), 3);
      barrier();
      default_group()->barrier()->wait();  // by c10d: not over NCCL either
      set_group_timeout(7s);
      EXPECT_THAT(notes_of("default"), Contains("timeout 7000"));
    }
    EXPECT_EQ(notes_of("default").back(), "shutdown");
  });
}

TEST(NcclGroups, FurtherGroupsHaveItToo) {
  run_ranks(3, [](int rank) {
    library();
    auto world = init_process_group({.backend = "cpu:lockstep,cuda:nccl"});
    auto inherited = new_group({0, 2});
    auto plain = new_group({}, {}, {.backend = "lockstep"});
    EXPECT_EQ(plain->getBackend(at::kCUDA)->getBackendName(), "lockstep");
    auto halves = split_group({}, {{0, 1}, {2}});
    EXPECT_EQ(get_backend(halves), "cpu:lockstep,cuda:nccl");
    EXPECT_THAT(notes_of(halves->getGroupName()),
                ElementsAre(HasSubstr(rank == 2 ? "0 of 1" : std::to_string(rank) + " of 2")));
    auto local = new_group({0, 1}, {}, {.use_local_synchronization = true});
    if (is_member(local)) {
      EXPECT_EQ(local->getBackend(at::kCUDA)->getBackendName(), "nccl");
    }
    if (rank != 1) {
      EXPECT_THAT(notes_of("1"), ElementsAre(HasSubstr(rank == 0 ? "0 of 2" : "1 of 2")));
      destroy_process_group(inherited);
      EXPECT_EQ(notes_of("1").back(), "shutdown");
    } else {
      EXPECT_THAT(notes_of("1"), IsEmpty());
    }
    barrier();
    abort(halves);
    EXPECT_EQ(notes_of(halves->getGroupName()).back(), "abort");
    EXPECT_THAT(notes_of("default"), Not(Contains("abort"))) << "other groups go on";
    at::Tensor tensor = at::ones({2});
    all_reduce(tensor);
  });
}

TEST(NcclGroups, TheSameNameAgainMeetsUnderOtherKeys) {
  run_ranks(2, [](int) {
    library();
    auto world = init_process_group({.backend = "nccl"});
    for (int i = 0; i < 3; ++i) {
      auto group = new_group({}, {}, {.group_name = "again"});
      barrier(group);
      destroy_process_group(group);
    }
    EXPECT_THAT(notes_of("again"), ::testing::SizeIs(6));
  });
}

TEST(NcclGroups, AGroupIsMadeOnAllRanksOrOnNone) {
  run_ranks(3, [](int rank) {
    library();
    auto world = init_process_group({.backend = "nccl"});
    library().fails_ = rank == 1;
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::Error>([] { new_group(); }), HasSubstr("this card is broken"));
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>([] { new_group(); }),
                  AllOf(HasSubstr("process group '1' was not made: rank 1 could not make a NCCL backend")));
    }
    library().fails_ = false;
    auto group = new_group();
    barrier(group);
  });
}

TEST(NcclGroups, ARankWithoutNcclIsNamedOnAllRanks) {
  run_ranks(3, [](int rank) {
    library().problem_ = rank == 2 ? "the driver is too old" : "";
    EXPECT_THAT(message_of<c10::ValueError>([] { auto world = init_process_group({.backend = "nccl"}); }),
                HasSubstr("backend 'nccl' can't be used: rank 2: the driver is too old"));
    auto world = init_process_group();
    EXPECT_EQ(get_backend(), "lockstep");
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  new_group({0, 2}, {}, {.backend = "nccl"});
                }),
                HasSubstr("rank 2: the driver is too old"));
    auto without = new_group({0, 1}, {}, {.backend = "nccl"});
    if (is_member(without)) {
      EXPECT_EQ(get_backend(without), "nccl");
    }
  });
}

TEST(NcclGroups, WithADeadPeerTheyAreAbortedInsteadOfFinished) {
  const auto outcomes = run_ranks_collect(2,
                                          [](int rank) {
                                            library();
                                            auto world = init_process_group({.backend = "nccl"});
                                            barrier();
                                            if (rank == 1) std::_Exit(0);
                                            EXPECT_THROW(barrier(), c10::DistBackendError);
                                            destroy_process_group();
                                            EXPECT_EQ(notes_of("default").back(), "abort");
                                            EXPECT_THAT(notes_of("default"), Not(Contains("shutdown")));
                                          },
                                          {.expected_failures = {1}});
  EXPECT_EQ(outcomes[0].exit_status, 0) << outcomes[0].exception.value_or(outcomes[0].output);
}

TEST(NcclGroups, ThatShrinkGetANewOne) {
  const auto outcomes =
      run_ranks_collect(3,
                        [](int rank) {
                          library();
                          auto world = init_process_group({.backend = "nccl", .nccl = {.max_ctas = 2}});
                          barrier();
                          if (rank == 2) std::_Exit(0);
                          shrink_group();
                          EXPECT_EQ(get_world_size(), 2);
                          EXPECT_EQ(notes_of("default").back(), "abort");
                          EXPECT_THAT(notes_of("default:shrunk:1"),
                                      ElementsAre(AllOf(HasSubstr(" of 2, "), HasSubstr("at most 2"))));
                          EXPECT_EQ(default_group()->getBackend(at::kCUDA)->getBackendName(), "nccl");
                          at::Tensor tensor = at::ones({1});
                          all_reduce(tensor);
                          EXPECT_EQ(tensor.item<float>(), 2);
                        },
                        {.expected_failures = {2}});
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(outcomes[rank].exit_status, 0) << outcomes[rank].exception.value_or(outcomes[rank].output);
}

}  // namespace
}  // namespace lockstep::nccl_groups_test

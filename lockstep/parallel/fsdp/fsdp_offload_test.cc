// What outlives a step in files.
#include <csignal>
#include <fstream>
#include <gmock/gmock.h>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/internal/offloaded_tensors.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_offload_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using fsdp_test::make_net;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::run_ranks;
using testing::SharedFolder;
using ::testing::SizeIs;

/// The file that is mapped where this tensor lies; "" in memory.
std::string file_of(const torch::Tensor& tensor) {
  const auto place = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    if (place < begin || place >= end) continue;
    const auto slash = line.find('/');
    return slash == std::string::npos ? "" : line.substr(slash);
  }
  return "";
}

std::vector<torch::Tensor> state_tensors(const StateDict& optim_state) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, values] : from_object<StateDict>(optim_state.at("state"))) {
    for (const auto& [what, value] : from_object<StateDict>(values)) {
      if (value.isTensor() && what != "step") tensors.push_back(value.toTensor());
    }
  }
  return tensors;
}

template <class Optimizer, class Options>
void compare(const Options& options, const fsdp::MixedPrecision& precision, const SharedFolder& folder,
             bool gather = false) {
  run_ranks(3,
            [&](int rank) {
              auto world = init_process_group();
              const auto train = [&](const fsdp::CPUOffload& offload) {
                auto net = make_net();
                net->to(at::kFloat);
                FullyShardedDataParallel model(
                    net, {.mixed_precision = precision, .cpu_offload = offload, .gather = gather});
                auto optimizer = model.template make_optimizer<Optimizer>(options);
                for (int step = 0; step < 6; ++step) {
                  optimizer->zero_grad();
                  const auto x = fsdp_test::batch(step, 3, rank).to(at::kFloat);
                  fsdp_test::loss_of(model(x).to(at::kFloat)).backward();
                  optimizer->step();
                  // The state is loaded: new tensors, which go to the file again.
                  if (step == 2)
                    model.load_full_optim_state_dict(*optimizer, model.full_optim_state_dict(*optimizer));
                }
                if (offload.offload_params) {
                  const std::string prefix = (folder.path() / ".lockstep-offload-").string();
                  if (!gather) {
                    EXPECT_THAT(file_of(net->first->weight), HasSubstr(prefix));
                  }
                  for (const auto& shard : model.parameters()) {
                    if (shard.numel() == 0) continue;
                    EXPECT_THAT(file_of(shard), HasSubstr(prefix)) << shard.sizes();
                  }
                  size_t states = 0;
                  for (const auto& [key, state] : optimizer->state()) {
                    for (const auto& tensor : fsdp::internal::tensors_of(*state)) {
                      if (!tensor.defined() || tensor.numel() == 0) continue;
                      EXPECT_THAT(file_of(tensor), HasSubstr(prefix)) << tensor.sizes();
                      ++states;
                    }
                  }
                  EXPECT_GT(states, 4U);
                  EXPECT_THAT(SharedFolder::entries_of(folder.path()), IsEmpty()) << "files have no names";
                }
                auto state = model.full_state_dict();
                const auto optim_state = model.full_optim_state_dict(*optimizer);
                int number = 0;
                for (const auto& tensor : state_tensors(optim_state))
                  state.emplace("state" + std::to_string(number++), tensor);
                return state;
              };
              const auto expected = train({});
              const auto actual = train({.offload_params = true, .directory = folder.path()});
              testing::expect_equal(actual, expected);
            },
            {.environment = folder.environment()});
}

TEST(FsdpOffload, TrainsAsInMemory) {
  const SharedFolder folder;
  compare<optim::AdamW>(optim::AdamWOptions(0.01).amsgrad(true), {}, folder);
  compare<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9).dampening(0.3), {}, folder);
  compare<optim::RMSprop>(optim::RMSpropOptions(0.01).centered(true).momentum(0.5),
                          {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, folder);
  compare<optim::Adagrad>(optim::AdagradOptions(0.05), {}, folder);
}

TEST(FsdpOffload, RowsThatAreGatheredTrainAsInMemory) {
  const SharedFolder folder;
  compare<optim::AdamW>(optim::AdamWOptions(0.01), {}, folder, /*gather=*/true);
  compare<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9),
                      {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, folder, /*gather=*/true);
}

int64_t private_kilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(line.find(':') + 1));
  }
  return 0;
}

TEST(FsdpOffload, OfTheOptimizersStateNothingStaysInMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep what is freed";
#endif
  constexpr int64_t kWidth = 512, kLayers = 24;
  constexpr int64_t kStateKilobytes = 2 * kLayers * kWidth * kWidth * 4 / 1024;
  const SharedFolder folder;
  run_ranks(1,
            [&](int) {
              auto world = init_process_group();
              nn::Sequential net;
              for (int64_t layer = 0; layer < kLayers; ++layer) net->push_back(nn::Linear(kWidth, kWidth));
              FullyShardedDataParallel model(
                  net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1),
                        .cpu_offload = {.offload_params = true, .directory = folder.path()}});
              const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
              model.forward(torch::ones({2, kWidth})).sum().backward();
              const int64_t before = private_kilobytes();
              optimizer->step();
              EXPECT_LT(private_kilobytes() - before, kStateKilobytes / 3);
              EXPECT_EQ(optimizer->state().size(), static_cast<size_t>(2 * kLayers));
            },
            {.environment = folder.environment()});
}

TEST(FsdpOffload, AFullDiskIsAnErrorThatNamesTheDirectoryOnAllRanks) {
  const SharedFolder folder;
  const auto no_such = folder.path() / "none";
  run_ranks(2,
            [&](int rank) {
              auto world = init_process_group();
              const auto wrap = [&](const std::filesystem::path& directory,
                                    const fsdp::MixedPrecision& precision = {}) {
                return message_of<c10::Error>([&] {
                  FullyShardedDataParallel model(
                      make_net(), {.mixed_precision = precision,
                                   .cpu_offload = {.offload_params = true, .directory = directory}});
                });
              };
              const std::string told = "1 rank of the group failed to";
              EXPECT_THAT(wrap(no_such), HasSubstr(rank == 0 ? no_such.string() : told));
              // Rank 0 makes that of the weights.
              if (rank == 0) failpoint::configure("fsdp.offload.allocate=errno(28)");
              EXPECT_THAT(wrap(folder.path()), HasSubstr(rank == 0 ? "KiB in " + folder.path().string() +
                                                                         ": No space left on device"
                                                                   : told));
              failpoint::configure("");
              // Each makes that of its rows in full precision.
              if (rank == 1) failpoint::configure("fsdp.offload.allocate=errno(28)");
              EXPECT_THAT(wrap(folder.path(), {.param_dtype = at::kBFloat16}),
                          HasSubstr(rank == 1 ? "No space left on device" : told));
              failpoint::configure("");
              EXPECT_THAT(SharedFolder::entries_of(folder.path()), IsEmpty());
              barrier();
              FullyShardedDataParallel model(
                  make_net(), {.cpu_offload = {.offload_params = true, .directory = folder.path()}});
              EXPECT_NO_THROW(model(fsdp_test::batch(0, 1)));
            },
            {.environment = folder.environment()});
}

TEST(FsdpOffload, WhatAKilledJobHasLeftIsRemoved) {
  const SharedFolder folder;
  const auto wrap = [&] {
    return FullyShardedDataParallel(make_net(),
                                    {.cpu_offload = {.offload_params = true, .directory = folder.path()}});
  };
  const auto outcomes =
      testing::run_ranks_collect(2,
                                 [&](int rank) {
                                   auto world = init_process_group();
                                   if (rank == 0) failpoint::configure("fsdp.offload.named=kill(9)");
                                   EXPECT_THROW(wrap(), c10::Error);
                                 },
                                 {.expected_failures = {0}, .environment = folder.environment()});
  if (outcomes[0].pid != 0) {
    EXPECT_EQ(outcomes[0].signal.value_or(0), SIGKILL);
    EXPECT_THAT(SharedFolder::entries_of(folder.path()), SizeIs(1))
        << "it has died while the file had a name";
  }
  run_ranks(2,
            [&](int) {
              auto world = init_process_group();
              const auto model = wrap();
              EXPECT_THAT(SharedFolder::entries_of(folder.path()), IsEmpty());
            },
            {.environment = folder.environment()});
  // Killed during a training there is nothing to remove.
  const auto killed =
      testing::run_ranks_collect(1,
                                 [&](int) {
                                   auto world = init_process_group();
                                   const auto model = wrap();
                                   testing::die();
                                 },
                                 {.expected_failures = {0}, .environment = folder.environment()});
  if (killed[0].pid != 0) {
    EXPECT_THAT(SharedFolder::entries_of(folder.path()), IsEmpty());
  }
}

}  // namespace
}  // namespace lockstep::fsdp_offload_test

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/algorithms/staging.h>
#include <lockstep/collectives/testing/operation_stream.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/test_device.h>

// Random calls of every operation with tensors on devices and on the CPU, each rank choosing for itself,
// against what a single process computes on the CPU.
namespace lockstep::properties_device_test {
namespace {

namespace algorithms = collectives::internal::algorithms;
using namespace std::chrono_literals;
using testing::operations;
using testing::OperationStream;
using testing::test_device;
using testing::test_seed;

class PropertiesOnDevice : public ::testing::TestWithParam<int> {};

TEST_P(PropertiesOnDevice, EveryOperationEqualsOneProcess) {
  const uint64_t seed = test_seed();
  const size_t decks = testing::long_run() ? 40 : 4;
  testing::run_ranks(
      GetParam(),
      [&](int rank) {
        auto world = init_process_group();
        algorithms::set_chunk_bytes_for_testing(4096);  // several chunks from few bytes
        testing::Place place{rank, default_group(), {}, {}};
        for (int other = 0; other < world.size(); ++other) place.members.push_back(other);
        place.devices.push_back(c10::kCPU);
        for (int device = 0; device < testing::test_device_count(); ++device) {
          place.devices.insert(place.devices.end(), 2, test_device(device));
        }
        place.sparse_on_devices = !testing::test_device_is_simulated();
        OperationStream stream(place, seed, "LOCKSTEP_TEST_SEED=" + std::to_string(seed) + ", devices");
        for (size_t i = 0; i < decks * operations().size(); ++i) stream.step();
        stream.finish();
      },
      {.deadline = testing::long_run() ? 500s : 60s, .environment = testing::seed_environment(seed)});
}

INSTANTIATE_TEST_SUITE_P(Ranks, PropertiesOnDevice, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace lockstep::properties_device_test

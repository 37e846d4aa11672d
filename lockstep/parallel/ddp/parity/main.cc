// Trains what ddp_parity_test.py asks for and writes the weights, so that they can be compared with
// PyTorch's.
//
//     lockstep run --nproc-per-node N ddp_parity_driver JOBS OUTPUT
//
// JOBS: what parity_jobs.make_jobs() gives, pickled. OUTPUT: rank r writes {job name: {name: tensor}} to
// OUTPUT.r.
#include <iostream>

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/parallel/ddp/parity/dictionary.h>
#include <lockstep/parallel/ddp/parity/train.h>

namespace {

/// Ranks 0 and 1, 2 and 3, …
lockstep::ProcessGroup make_pairs(int world_size) {
  std::vector<std::vector<int>> pairs;
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank % 2 == 0) pairs.emplace_back();
    pairs.back().push_back(rank);
  }
  return lockstep::new_subgroups_by_enumeration(pairs).first;
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3, "usage: ddp_parity_driver JOBS OUTPUT");
  auto world = lockstep::init_process_group();
  const auto pairs = make_pairs(world.size());
  const auto jobs = lockstep::testing::read_pickle(argv[1]).toGenericDict();
  c10::Dict<std::string, parity::Tensors> results;
  for (const auto& entry : jobs) {
    const std::string name = entry.key().toStringRef();
    try {
      results.insert(name,
                     parity::train(parity::Dictionary(entry.value()), world.rank(), world.size(), pairs));
    } catch (const std::exception&) {
      std::cerr << "ddp_parity_driver: in the job '" << name << "':" << std::endl;
      throw;
    }
  }
  lockstep::testing::write_pickle(std::string(argv[2]) + "." + std::to_string(world.rank()), results);
} catch (const std::exception& error) {
  std::cerr << "ddp_parity_driver: " << error.what() << std::endl;
  return 1;
}

#pragma once

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>

/// Files by which drivers talk with their tests in Python, which has torch.save() and torch.load() for them.
namespace lockstep::testing {

/// Throws c10::Error naming the path if it can't be read.
inline c10::IValue read_pickle(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "can't read ", path);
  return torch::pickle_load(std::vector<char>(std::istreambuf_iterator<char>(file), {}));
}

/// Throws c10::Error naming the path if it can't be written.
inline void write_pickle(const std::string& path, const c10::IValue& value) {
  const auto bytes = torch::pickle_save(value);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), "can't write ", path);
}

/// An unpickled dictionary knows no types of keys and values.
inline c10::IValue at_key(const c10::IValue& dictionary, const std::string& key) {
  return dictionary.toGenericDict().at(c10::IValue(key));
}

/// What a driver does that is started as "DRIVER JOBS OUTPUT" on each rank, for a dictionary of jobs: writes {name: job(its
/// content, the rank)} to OUTPUT.RANK.
template <class Job>
int run_jobs(int argc, char** argv, const Job& job) {
  TORCH_CHECK(argc == 3, "usage: ", argv[0], " JOBS OUTPUT");
  const auto world = init_process_group();
  c10::impl::GenericDict results(c10::StringType::get(), c10::AnyType::get());
  for (const auto& entry : read_pickle(argv[1]).toGenericDict()) {
    results.insert(entry.key(), job(entry.value(), world.rank()));
  }
  write_pickle(std::string(argv[2]) + "." + std::to_string(world.rank()), results);
  return 0;
}

}  // namespace lockstep::testing

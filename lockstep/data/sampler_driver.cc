// Prints the indices that samplers and the loader give, for comparison with Python's: one line of answer per
// line of standard input, indices separated by blanks and epochs by " | ", or "error: …".
//
//   distributed SIZE NUM_REPLICAS RANK SHUFFLE SEED DROP_LAST EPOCH
//   loader SIZE BATCH_SIZE SHUFFLE SEED|none DROP_LAST NUM_WORKERS EPOCHS MANUAL_SEED
//     batches separated by " , "; the last number is one that the default generator gives after the epochs
#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/distributed_sampler.h>
#include <lockstep/data/internal/random.h>

namespace {

using lockstep::data::DataLoader;
using lockstep::data::DistributedSampler;

struct Indices {
  int64_t size() const { return size_; }
  std::vector<int64_t> get_batch(std::span<const int64_t> indices) const {
    return {indices.begin(), indices.end()};
  }
  int64_t size_;
};

void print(const std::vector<int64_t>& indices) {
  for (const int64_t index : indices) std::cout << index << ' ';
}

void distributed(std::istream& in) {
  int64_t size = 0;
  int64_t num_replicas = 0;
  int64_t rank = 0;
  int64_t seed = 0;
  int64_t epoch = 0;
  bool shuffle = false;
  bool drop_last = false;
  in >> size >> num_replicas >> rank >> shuffle >> seed >> drop_last >> epoch;
  TORCH_CHECK(in, "malformed line");
  DistributedSampler sampler(size, num_replicas, rank, shuffle, seed, drop_last);
  sampler.set_epoch(epoch);
  const auto indices = sampler.indices();
  TORCH_CHECK(static_cast<int64_t>(indices.size()) == sampler.size(), "size() is ", sampler.size());
  print(indices);
}

void loader(std::istream& in) {
  int64_t size = 0;
  int epochs = 0;
  int64_t manual_seed = 0;
  std::string seed;
  lockstep::data::DataLoaderOptions options;
  in >> size >> options.batch_size >> options.shuffle >> seed >> options.drop_last >> options.num_workers >>
      epochs >> manual_seed;
  TORCH_CHECK(in, "malformed line");
  if (seed != "none") options.seed = std::stoll(seed);
  at::manual_seed(static_cast<uint64_t>(manual_seed));
  DataLoader batches(Indices{size}, options);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    int64_t count = 0;
    for (const auto& batch : batches) {
      print(batch);
      std::cout << ", ";
      ++count;
    }
    TORCH_CHECK(count == batches.size(), "size() is ", batches.size());
    std::cout << "| ";
  }
  std::cout << lockstep::data::internal::draw_seed(std::nullopt);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string kind;
    in >> kind;
    try {
      TORCH_CHECK(kind == "distributed" || kind == "loader", "unknown kind '", kind, "'");
      kind == "distributed" ? distributed(in) : loader(in);
    } catch (const c10::Error& error) {
      std::cout << "error: " << error.what_without_backtrace();
    }
    std::cout << std::endl;
  }
}

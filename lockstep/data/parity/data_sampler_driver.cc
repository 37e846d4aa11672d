// Prints the indices that samplers and the loader give, for comparison with Python's: one line of answer per
// line of standard input, indices separated by blanks and epochs by " | ", or "error: …".
//
//   distributed SIZE NUM_REPLICAS RANK SHUFFLE SEED DROP_LAST EPOCH
//   random SIZE REPLACEMENT NUM_SAMPLES|none SEED|none MANUAL_SEED
//   subset SIZE SEED|none MANUAL_SEED        the random order of 3, 10, 17, …
//   weighted SIZE NUM_SAMPLES REPLACEMENT SEED|none MANUAL_SEED     weights 0, 1, 2, 0, 1, 2, …
//   batch SIZE BATCH_SIZE DROP_LAST SEED     of a random order; batches separated by " , "
//     two epochs each
//   split SIZE SEED|none MANUAL_SEED LENGTH…     all lengths whole, or all with a point
//     parts separated by " | "
//   loader SIZE BATCH_SIZE SHUFFLE SEED|none DROP_LAST NUM_WORKERS EPOCHS MANUAL_SEED
//     batches separated by " , "; the last number is one that the default generator gives after the epochs
#include <cstdint>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/datasets/subset.h>
#include <lockstep/data/internal/random.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/data/samplers/sampler.h>
#include <lockstep/testing/driver.h>

namespace data_sampler_driver {
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

/// The word's generator; none stands for the default one.
std::optional<at::Generator> generator_of(const std::string& word) {
  if (word == "none") return std::nullopt;
  return lockstep::data::internal::make_generator(static_cast<uint64_t>(std::stoll(word)));
}

void two_epochs(lockstep::data::Sampler& sampler) {
  for (int epoch = 0; epoch < 2; ++epoch) {
    const auto indices = sampler.indices();
    TORCH_CHECK(static_cast<int64_t>(indices.size()) == sampler.size(), "size() is ", sampler.size());
    print(indices);
    std::cout << "| ";
  }
}

void random(std::istream& in) {
  int64_t size = 0;
  bool replacement = false;
  std::string num_samples;
  std::string seed;
  uint64_t manual_seed = 0;
  in >> size >> replacement >> num_samples >> seed >> manual_seed;
  TORCH_CHECK(in, "malformed line");
  at::manual_seed(manual_seed);
  lockstep::data::RandomSamplerOptions options{.replacement = replacement, .generator = generator_of(seed)};
  if (num_samples != "none") options.num_samples = std::stoll(num_samples);
  lockstep::data::RandomSampler sampler(size, options);
  two_epochs(sampler);
}

void subset(std::istream& in) {
  int64_t size = 0;
  std::string seed;
  uint64_t manual_seed = 0;
  in >> size >> seed >> manual_seed;
  TORCH_CHECK(in, "malformed line");
  at::manual_seed(manual_seed);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < size; ++i) indices.push_back(3 + 7 * i);
  lockstep::data::SubsetRandomSampler sampler(indices, generator_of(seed));
  two_epochs(sampler);
}

void weighted(std::istream& in) {
  int64_t size = 0;
  int64_t num_samples = 0;
  bool replacement = false;
  std::string seed;
  uint64_t manual_seed = 0;
  in >> size >> num_samples >> replacement >> seed >> manual_seed;
  TORCH_CHECK(in, "malformed line");
  at::manual_seed(manual_seed);
  std::vector<double> weights;
  for (int64_t i = 0; i < size; ++i) weights.push_back(static_cast<double>(i % 3));
  lockstep::data::WeightedRandomSampler sampler(weights, num_samples, replacement, generator_of(seed));
  two_epochs(sampler);
}

void batch(std::istream& in) {
  int64_t size = 0;
  int64_t batch_size = 0;
  bool drop_last = false;
  std::string seed;
  in >> size >> batch_size >> drop_last >> seed;
  TORCH_CHECK(in, "malformed line");
  lockstep::data::RandomSampler order(size, generator_of(seed));
  lockstep::data::BatchSampler sampler(order, batch_size, drop_last);
  for (int epoch = 0; epoch < 2; ++epoch) {
    const auto batches = sampler.batches();
    TORCH_CHECK(static_cast<int64_t>(batches.size()) == sampler.size(), "size() is ", sampler.size());
    for (const auto& indices : batches) {
      print(indices);
      std::cout << ", ";
    }
    std::cout << "| ";
  }
}

void split(std::istream& in) {
  int64_t size = 0;
  std::string seed;
  uint64_t manual_seed = 0;
  in >> size >> seed >> manual_seed;
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  at::manual_seed(manual_seed);
  const Indices set{size};
  const auto show = [&](const auto& lengths) {
    for (const auto& part : lockstep::data::random_split(set, lengths, generator_of(seed))) {
      print(part.indices());
      std::cout << "| ";
    }
  };
  std::vector<double> numbers;
  for (const auto& word : words) numbers.push_back(std::stod(word));
  if (words.at(0).find('.') != std::string::npos) {
    show(numbers);
  } else {
    show(std::vector<int64_t>(numbers.begin(), numbers.end()));
  }
}

void loader(std::istream& in) {
  int64_t size = 0;
  int epochs = 0;
  int64_t manual_seed = 0;
  std::string seed;
  lockstep::data::DataLoaderOptions options;
  in >> size >> options.batch_size >> options.shuffle >> seed >> options.drop_last >> options.num_workers >>
      options.persistent_workers >> epochs >> manual_seed;
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

const std::map<std::string, void (*)(std::istream&)> kKinds = {{"distributed", distributed},
                                                               {"random", random},
                                                               {"subset", subset},
                                                               {"weighted", weighted},
                                                               {"batch", batch},
                                                               {"split", split},
                                                               {"loader", loader}};

}  // namespace

LOCKSTEP_DRIVER(data_sampler_driver) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string kind;
    in >> kind;
    try {
      const auto answer = kKinds.find(kind);
      TORCH_CHECK(answer != kKinds.end(), "unknown kind '", kind, "'");
      answer->second(in);
    } catch (const c10::Error& error) {
      std::cout << "error: " << error.what_without_backtrace();
    }
    std::cout << std::endl;
  }
  return 0;
}

}  // namespace data_sampler_driver

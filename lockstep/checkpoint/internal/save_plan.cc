#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/internal/save_plan.h>

namespace lockstep::checkpoint::internal {
namespace {

/// One tensor: the rank that has it, and which of that rank's offers it is.
struct Owned {
  int64_t bytes = 0;
  std::vector<std::pair<size_t, int64_t>> owners;
};

}  // namespace

std::string file_stem(const std::string& part) {
  std::string stem;
  for (const char c : part) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || c == '_' || c == '-' || (c == '.' && !stem.empty())) {
      stem += c;
    } else {
      stem += formatted("%%%02X", byte);
    }
  }
  TORCH_CHECK_VALUE(!stem.empty() && stem.size() <= 200, "a part of a checkpoint is called '",
                    printable(part), "', and the name must make a file's, of 1 to 200 characters");
  return stem;
}

std::vector<std::vector<FileTask>> assign_files(const std::vector<std::vector<TensorOffer>>& offers,
                                                bool sharded, int64_t least_assigned) {
  std::map<std::pair<std::string, std::string>, Owned> tensors;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    for (size_t i = 0; i < offers[rank].size(); ++i) {
      const auto& [part, name, bytes] = offers[rank][i];
      Owned& tensor = tensors[{part, name}];
      if (tensor.owners.empty()) tensor.bytes = bytes;
      tensor.owners.emplace_back(rank, static_cast<int64_t>(i));
    }
  }
  std::vector<std::pair<const std::pair<std::string, std::string>*, const Owned*>> by_size;
  for (const auto& [key, tensor] : tensors) by_size.emplace_back(&key, &tensor);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const auto& a, const auto& b) { return a.second->bytes > b.second->bytes; });

  std::vector<int64_t> loads(offers.size());
  std::map<std::string, std::map<size_t, std::vector<int64_t>>> parts;  // by writer
  for (const auto& [key, tensor] : by_size) {
    auto writer = tensor->owners.front();
    if (sharded && tensor->bytes >= least_assigned) {
      writer =
          *std::min_element(tensor->owners.begin(), tensor->owners.end(),
                            [&](const auto& a, const auto& b) { return loads[a.first] < loads[b.first]; });
    }
    loads[writer.first] += tensor->bytes;
    parts[key->first][writer.first].push_back(writer.second);
  }

  std::vector<std::vector<FileTask>> tasks(offers.size());
  std::set<std::string> files;
  for (auto& [part, writers] : parts) {
    size_t number = 0;
    for (auto& [rank, indices] : writers) {
      std::string file = file_stem(part);
      if (writers.size() > 1) file += formatted("-%05zu-of-%05zu", ++number, writers.size());
      file += ".safetensors";
      TORCH_CHECK_VALUE(files.insert(file).second, "part '", printable(part),
                        "' of the checkpoint would be written to ", file, ", as another part is; rename it");
      tasks[rank].emplace_back(file, part, std::move(indices));
    }
  }
  return tasks;
}

}  // namespace lockstep::checkpoint::internal

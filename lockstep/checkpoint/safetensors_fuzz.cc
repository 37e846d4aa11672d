// Any bytes as a safetensors file: tensors that the file can hold and that can be written again, or a
// CheckpointError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/serialization/safetensors_header.h>
#include <lockstep/testing/fuzz_driver.h>
#include <lockstep/testing/memory_file.h>

namespace lockstep::safetensors_fuzz {
namespace {

std::vector<std::string> seeds() {
  using serialization::SafetensorsEntry;
  std::vector<SafetensorsEntry> tensors = {{"fc1.weight", at::kFloat, {2, 3}, 0, 0},
                                           {"fc1.bias", at::kHalf, {2}, 0, 0},
                                           {"empty", at::kLong, {0, 4}, 0, 0},
                                           {"scalar", at::kBool, {}, 0, 0},
                                           {"packed", at::ScalarType::Float4_e2m1fn_x2, {2}, 0, 0}};
  const auto bytes = static_cast<size_t>(serialization::lay_out(tensors));
  const std::string header = serialization::make_safetensors_header({tensors, {{"format", "pt"}}});
  return {header + std::string(bytes, 'x'), serialization::make_safetensors_header({})};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(safetensors, seeds) {
  static const lockstep::testing::MemoryFile file;
  file.replace(data, size);
  try {
    const auto tensors = safetensors::load_file(file.path());
    const safetensors::SafeOpen open(file.path());
    serialization::SafetensorsHeader again{{}, open.metadata()};
    size_t bytes = 0;
    for (const std::string& name : open.keys()) {
      const at::Tensor& tensor = tensors.at(name);
      const at::Tensor single = open.get_tensor(name);
      if (tensor.nbytes() != single.nbytes() || tensor.sizes() != single.sizes()) std::abort();
      if (tensor.numel() > 0 &&
          std::memcmp(tensor.const_data_ptr(), single.const_data_ptr(), tensor.nbytes()) != 0) {
        std::abort();
      }
      bytes += tensor.nbytes();
      again.tensors.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
    }
    if (bytes > size || open.keys().size() != tensors.size()) std::abort();
    const int64_t data_bytes = serialization::lay_out(again.tensors);
    const std::string header = serialization::make_safetensors_header(again);
    const auto parsed =
        serialization::parse_safetensors_header(std::string_view(header).substr(8), data_bytes, "again");
    if (parsed.tensors.size() != again.tensors.size() || parsed.metadata != again.metadata) std::abort();
  } catch (const CheckpointError&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::safetensors_fuzz

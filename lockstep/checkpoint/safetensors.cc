#include <cerrno>
#include <unordered_map>

#include <ATen/ops/empty.h>

#include <lockstep/base/files/file_replacement.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/tensor_file.h>
#include <lockstep/checkpoint/safetensors.h>

namespace lockstep::safetensors {

void save_file(const std::map<std::string, at::Tensor>& tensors, const std::filesystem::path& filename,
               const std::map<std::string, std::string>& metadata) {
  std::vector<checkpoint::internal::NamedTensor> named;
  for (const auto& [name, tensor] : tensors) named.push_back({name, tensor});
  FileReplacement temporary(checkpoint::internal::temporary_name(filename));
  checkpoint::internal::write_tensor_file(temporary.name(), named, metadata,
                                          {.sync = false, .checksums = false});
  checkpoint::internal::check_generation(filename);
  if (!temporary.commit(filename)) {
    checkpoint::internal::throw_system_error("rename a temporary file to", filename, errno);
  }
  checkpoint::internal::remove_old_temporaries(filename);
}

std::map<std::string, at::Tensor> load_file(const std::filesystem::path& filename, c10::Device device) {
  const checkpoint::internal::InputFile file(filename);
  auto tensors = checkpoint::internal::read_tensors(file, checkpoint::internal::read_tensor_header(file));
  if (!device.is_cpu()) {
    for (auto& [name, tensor] : tensors) tensor = tensor.to(device);
  }
  return tensors;
}

struct SafeOpen::File {
  explicit File(const std::filesystem::path& filename)
      : input(filename), open(checkpoint::internal::read_tensor_header(input)) {
    for (size_t i = 0; i < open.header.tensors.size(); ++i) index.emplace(open.header.tensors[i].name, i);
  }
  checkpoint::internal::InputFile input;
  checkpoint::internal::OpenTensorFile open;
  std::unordered_map<std::string, size_t> index;
};

SafeOpen::SafeOpen(const std::filesystem::path& filename, c10::Device device)
    : file_(std::make_unique<File>(filename)), device_(device) {}
SafeOpen::~SafeOpen() = default;
SafeOpen::SafeOpen(SafeOpen&&) noexcept = default;
SafeOpen& SafeOpen::operator=(SafeOpen&&) noexcept = default;

std::vector<std::string> SafeOpen::keys() const {
  std::vector<std::string> names;
  for (const auto& tensor : file_->open.header.tensors) names.push_back(tensor.name);
  return names;
}

const std::map<std::string, std::string>& SafeOpen::metadata() const {
  return file_->open.header.metadata;
}

at::Tensor SafeOpen::get_tensor(const std::string& name) const {
  const auto found = file_->index.find(name);
  TORCH_CHECK_VALUE(found != file_->index.end(), file_->input.path().string(), " has no tensor '",
                    printable(name), "'");
  const serialization::SafetensorsEntry& entry = file_->open.header.tensors[found->second];
  at::Tensor tensor = at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
  const auto bytes = static_cast<size_t>(entry.end - entry.begin);
  file_->input.read(tensor.mutable_data_ptr(), bytes, file_->open.data_begin + entry.begin);
  checkpoint::internal::normalize_bools(static_cast<char*>(tensor.mutable_data_ptr()), bytes, entry.dtype);
  return device_.is_cpu() ? tensor : tensor.to(device_);
}

}  // namespace lockstep::safetensors

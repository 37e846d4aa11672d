#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/internal/checksum.h>
#include <lockstep/checkpoint/internal/pages.h>
#include <lockstep/checkpoint/internal/tensor_file.h>

namespace lockstep::checkpoint::internal {
namespace {

// What two checksums and a write go over one after the other stays in the processor's cache.
constexpr int64_t kChunk = 256 << 10;

template <class Action>
void for_chunks(int64_t bytes, const Action& action) {
  for (int64_t at = 0; at < bytes; at += kChunk) action(at, std::min(kChunk, bytes - at));
}

}  // namespace

at::Tensor as_written(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
}

WrittenFile write_tensor_file(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata,
                              const WriteOptions& options) {
  serialization::SafetensorsHeader header;
  header.metadata = metadata;
  std::unordered_map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    serialization::check_can_write(tensor, "tensor '" + printable(name) + "'");
    TORCH_CHECK_VALUE(index.emplace(name, i).second, "there are two tensors called '", printable(name), "'");
    header.tensors.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
  }
  serialization::lay_out(header.tensors);
  const std::string head = serialization::make_safetensors_header(header);

  WrittenFile written;
  written.offsets.resize(tensors.size());
  written.checksums.resize(tensors.size());
  OutputFile file(path);
  std::optional<Checksum> whole;
  if (options.checksums) whole.emplace();
  file.write(head.data(), head.size());
  if (whole) whole->update(head.data(), head.size());
  for (const serialization::SafetensorsEntry& entry : header.tensors) {
    const size_t i = index.at(entry.name);
    written.offsets[i] = file.size();
    const at::Tensor tensor = as_written(tensors[i].tensor);
    const auto* data = static_cast<const char*>(tensor.const_data_ptr());
    std::optional<Checksum> own;
    if (options.checksums) own.emplace();
    for_chunks(entry.end - entry.begin, [&](int64_t at, int64_t bytes) {
      LOCKSTEP_CHECK_FILE(options.cancelled == nullptr || !options.cancelled->load(), "writing ",
                          path.string(), " was given up, for the process ends");
      failpoint::here("checkpoint.within_file");
      file.write(data + at, static_cast<size_t>(bytes));
      if (!whole) return;
      whole->update(data + at, static_cast<size_t>(bytes));
      own->update(data + at, static_cast<size_t>(bytes));
    });
    if (own) written.checksums[i] = own->hex();
  }
  written.bytes = file.size();
  if (whole) written.checksum = whole->hex();
  failpoint::here("checkpoint.before_sync");
  file.finish(options.sync);
  failpoint::here("checkpoint.file_written");
  return written;
}

OpenTensorFile read_tensor_header(const InputFile& file) {
  const std::string& what = file.path().string();
  LOCKSTEP_CHECK_FILE(file.size() >= 8, what, " is truncated: it has ", file.size(),
                      " bytes, and a safetensors file begins with 8 that tell its header's length");
  uint64_t length = 0;
  file.read(&length, sizeof(length), 0);
  LOCKSTEP_CHECK_FILE(length <= static_cast<uint64_t>(serialization::kMaxSafetensorsHeader), what,
                      ": the header claims ", length, " bytes, more than the ",
                      serialization::kMaxSafetensorsHeader, " that safetensors allows");
  const auto header_bytes = static_cast<int64_t>(length);
  LOCKSTEP_CHECK_FILE(header_bytes <= file.size() - 8, what, " is truncated: the header claims ", length,
                      " bytes, and the file has ", file.size());
  std::string json(static_cast<size_t>(length), '\0');
  file.read(json.data(), json.size(), 8);
  OpenTensorFile open;
  open.data_begin = 8 + header_bytes;
  open.header = serialization::parse_safetensors_header(json, file.size() - open.data_begin, what);
  return open;
}

std::map<std::string, at::Tensor> read_tensors(const InputFile& file, const OpenTensorFile& open,
                                               std::string* checksum) {
  // One piece of memory for all: huge pages, and no allocation for each of thousands of small tensors.
  int64_t needed = 0;
  std::vector<int64_t> places;
  for (const serialization::SafetensorsEntry& entry : open.header.tensors) {
    places.push_back(needed);
    needed += (entry.end - entry.begin + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  }
  const auto pages = std::make_shared<Pages>(static_cast<size_t>(needed));

  Checksum whole;
  if (checksum != nullptr) {
    std::string head(static_cast<size_t>(open.data_begin), '\0');
    file.read(head.data(), head.size(), 0);
    whole.update(head.data(), head.size());
  }
  std::map<std::string, at::Tensor> tensors;
  for (size_t i = 0; i < open.header.tensors.size(); ++i) {
    const serialization::SafetensorsEntry& entry = open.header.tensors[i];
    const auto options = at::TensorOptions().dtype(entry.dtype);
    if (entry.begin == entry.end) {
      tensors.emplace(entry.name, at::empty(entry.shape, options));
      continue;
    }
    char* to = pages->data() + places[i];
    for_chunks(entry.end - entry.begin, [&](int64_t at, int64_t bytes) {
      file.read(to + at, static_cast<size_t>(bytes), open.data_begin + entry.begin + at);
      if (checksum != nullptr) whole.update(to + at, static_cast<size_t>(bytes));
      normalize_bools(to + at, static_cast<size_t>(bytes), entry.dtype);
    });
    tensors.emplace(entry.name, at::from_blob(
                                    to, entry.shape, [pages](void*) {}, options));
  }
  if (checksum != nullptr) *checksum = whole.hex();
  return tensors;
}

void normalize_bools(char* data, size_t bytes, at::ScalarType dtype) {
  if (dtype != at::kBool) return;
  for (size_t i = 0; i < bytes; ++i) data[i] = data[i] != 0 ? 1 : 0;
}

std::string checksum_of_range(const InputFile& file, int64_t offset, int64_t bytes) {
  Checksum checksum;
  std::vector<char> chunk(static_cast<size_t>(std::min(bytes, kChunk)));
  for_chunks(bytes, [&](int64_t at, int64_t part) {
    file.read(chunk.data(), static_cast<size_t>(part), offset + at);
    checksum.update(chunk.data(), static_cast<size_t>(part));
  });
  return checksum.hex();
}

}  // namespace lockstep::checkpoint::internal

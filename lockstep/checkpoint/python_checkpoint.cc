#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>

#include <lockstep/base/files/file_replacement.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/serialization/pickle/format.h>
#include <lockstep/serialization/pickle/object_reader.h>
#include <lockstep/serialization/pickle/writer.h>
#include <lockstep/serialization/zip_directory.h>

// torch/serialization.py: _save, _load. The zip archive NAME.pt has NAME/data.pkl, a pickle that names
// storages by persistent ids ("storage", class, key, location, number of elements), their bytes in
// NAME/data/KEY, and NAME/byteorder.
namespace lockstep {
namespace {

using c10::IValue;
using checkpoint::internal::InputFile;
using checkpoint::internal::OutputFile;
using serialization::ByteSource;
using serialization::ZipDirectory;

// ---- Reading ----

class FileSource final : public ByteSource {
 public:
  explicit FileSource(const std::filesystem::path& path) : file_(path), name_(path.string()) {}
  uint64_t size() const override { return static_cast<uint64_t>(file_.size()); }
  void read(void* data, size_t bytes, uint64_t offset) const override {
    file_.read(data, bytes, static_cast<int64_t>(offset));
  }
  const std::string& name() const override { return name_; }

 private:
  InputFile file_;
  std::string name_;
};

class ByteViewSource final : public ByteSource {
 public:
  ByteViewSource(std::string_view bytes, std::string_view name) : bytes_(bytes), name_(name) {}
  uint64_t size() const override { return bytes_.size(); }
  void read(void* data, size_t bytes, uint64_t offset) const override {
    if (bytes > 0) std::memcpy(data, bytes_.data() + offset, bytes);
  }
  const std::string& name() const override { return name_; }

 private:
  std::string_view bytes_;
  std::string name_;
};

/// The archive of a torch.save: its entries by their names without the prefix "NAME/".
class Archive {
 public:
  explicit Archive(const ByteSource& source) : source_(checked(source)), directory_(source) {
    for (const auto& [name, entry] : directory_.entries()) {
      const size_t slash = name.find('/');
      if (slash != std::string::npos && name.substr(slash) == "/data.pkl")
        prefix_ = name.substr(0, slash + 1);
    }
    LOCKSTEP_CHECK_FILE(!has("constants.pkl"), source_.name(),
                        " is a TorchScript archive: load it with torch::jit::load(), and give the module's "
                        "state to others by lockstep::state_dict()");
    LOCKSTEP_CHECK_FILE(!prefix_.empty(), source_.name(),
                        " is a zip archive, but not torch.save's: it has no data.pkl");
    const std::string order = has("byteorder") ? text("byteorder") : "little";
    LOCKSTEP_CHECK_FILE(order == "little", source_.name(), " was written on a machine with byte order '",
                        order.substr(0, 20), "'; save it again on a little-endian one");
  }

  bool has(const std::string& name) const { return directory_.entries().contains(prefix_ + name); }
  uint64_t size_of(const std::string& name) const {
    return directory_.entries().at(prefix_ + name).stored_size;
  }
  void read(const std::string& name, void* data) const { directory_.read(prefix_ + name, data); }
  std::string text(const std::string& name) const {
    std::string bytes(size_of(name), '\0');
    read(name, bytes.data());
    return bytes;
  }
  const std::string& name() const { return source_.name(); }

 private:
  /// Says what else it is, where that can be seen at its begin.
  static const ByteSource& checked(const ByteSource& source) {
    std::string begin(std::min<uint64_t>(source.size(), pickle::kStorageMagic.size()), '\0');
    source.read(begin.data(), begin.size(), 0);
    LOCKSTEP_CHECK_FILE(!begin.empty(), source.name(), " is empty");
    LOCKSTEP_CHECK_FILE(
        begin != pickle::kStorageMagic, source.name(),
        " is in torch.save's format from before PyTorch 1.6 (or of _use_new_zipfile_serialization=False); "
        "write it again in Python: torch.save(torch.load(path, weights_only=True), path)");
    return source;
  }

  const ByteSource& source_;
  const ZipDirectory directory_;
  std::string prefix_;
};

/// The object of data.pkl, with storages from the archive.
class FileReader final : public pickle::ObjectReader {
 public:
  FileReader(const Archive& archive, std::string_view bytes, std::string_view what)
      : ObjectReader(bytes, what), archive_(archive) {}

 private:
  /// ("storage", class, key, location, number of elements): everything comes to the CPU, whatever the
  /// location.
  void load_persistent(const pickle::Slot& id) override {
    const auto* parts = elements_of_tuple(id);
    if (!parts || parts->size() != 5) fail("a storage of unknown form");
    const IValue kind = value_of((*parts)[0]), key = value_of((*parts)[2]), count = value_of((*parts)[4]);
    const auto type = pickle::storage_type((*parts)[1]);
    if (!kind.isString() || kind.toStringView() != "storage" || !key.isString() || !count.isInt() || !type) {
      fail("a storage of unknown form");
    }
    auto [known, is_new] = storages_.try_emplace(key.toStringRef());
    if (is_new) known->second = load(key.toStringRef(), *type, count.toInt());
    if (known->second.scalar_type() != *type || known->second.numel() != count.toInt()) {
      fail("a storage of two types or sizes");
    }
    push_slot({pickle::Slot::Kind::kStorage, 0, known->second});
  }

  at::Tensor load(const std::string& key, at::ScalarType type, int64_t count) const {
    const std::string name = "data/" + key;
    if (!archive_.has(name)) fail("the storage '" + key.substr(0, 100) + "', which the file doesn't have");
    const uint64_t bytes = archive_.size_of(name), element = c10::elementSize(type);
    if (count < 0 || bytes % element != 0 || bytes / element != static_cast<uint64_t>(count)) {
      fail("a storage of " + std::to_string(count) + " elements in " + std::to_string(bytes) + " bytes");
    }
    at::Tensor storage = at::empty({count}, type);
    archive_.read(name, storage.mutable_data_ptr());
    // A bool of any other value would be undefined behaviour where it is read.
    if (type == at::kBool &&
        !pickle::are_bools({static_cast<const char*>(storage.const_data_ptr()), bytes})) {
      fail("a bool that is neither true nor false");
    }
    return storage;
  }

  const Archive& archive_;
  std::unordered_map<std::string, at::Tensor> storages_;
};

IValue read_object(const ByteSource& source) {
  const Archive archive(source);
  const std::string pickle = archive.text("data.pkl");
  try {
    return FileReader(archive, pickle, source.name() + " (data.pkl)").read();
  } catch (const CheckpointError&) {
    throw;
  } catch (const c10::DistBackendError& error) {
    throw CheckpointError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                          error.what_without_backtrace());
  }
}

// ---- Writing ----

/// data.pkl, and the storages that it names.
class FileWriter final : public pickle::Writer {
 public:
  FileWriter() : Writer(/*protocol=*/2, /*max_bytes=*/SIZE_MAX) {}

  /// By key. They keep the memory.
  const std::vector<at::Tensor>& storages() const { return storages_; }

 private:
  at::Tensor to_cpu(const at::Tensor& tensor) const override { return tensor.cpu(); }

  void write_storage(const at::Tensor& dense) override {
    const std::string_view typed = pickle::find_type_name(pickle::kStorageTypes, dense.scalar_type());
    // The same elements under two names (tied weights) are one storage.
    const std::pair memory(dense.const_data_ptr(), dense.nbytes());
    const auto [known, is_new] = keys_.try_emplace({memory, dense.scalar_type()}, storages_.size());
    if (is_new || dense.nbytes() == 0) {
      known->second = storages_.size();
      storages_.push_back(dense);
    }
    put(pickle::kMark);
    write_long_string("storage");
    put_global(typed.empty() ? "torch.storage" : "torch", typed.empty() ? pickle::kUntypedStorage : typed);
    write_long_string(std::to_string(known->second));
    write_long_string("cpu");
    write_integer(typed.empty() ? static_cast<int64_t>(dense.nbytes()) : dense.numel());
    put(pickle::kTuple);
    put(pickle::kBinPersistentId);
  }

  std::map<std::pair<std::pair<const void*, size_t>, at::ScalarType>, size_t> keys_;
  std::vector<at::Tensor> storages_;
};

void write_archive(const std::string& pickle, const std::vector<at::Tensor>& storages, OutputFile& file) {
  // The archive's destructor writes its end, and ends the process when that fails: so it is never told of
  // errors.
  std::exception_ptr error;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t bytes) {
    try {
      if (!error) file.write(data, bytes);
    } catch (...) {
      error = std::current_exception();
    }
    return bytes;
  });
  const auto write = [&](const std::string& name, const void* data, size_t bytes) {
    archive.writeRecord(name, data, bytes);
    if (error) std::rethrow_exception(error);
  };
  write("data.pkl", pickle.data(), pickle.size());
  write("byteorder", "little", std::strlen("little"));
  for (size_t key = 0; key < storages.size(); ++key) {
    write("data/" + std::to_string(key), storages[key].const_data_ptr(), storages[key].nbytes());
  }
  archive.writeEndOfFile();
  if (error) std::rethrow_exception(error);
}

}  // namespace

IValue load_python_object(const std::filesystem::path& path) {
  return read_object(FileSource(path));
}

IValue parse_python_object(std::string_view bytes, std::string_view name) {
  return read_object(ByteViewSource(bytes, name));
}

StateDict load_python_checkpoint(const std::filesystem::path& path) {
  const IValue object = load_python_object(path);
  LOCKSTEP_CHECK_FILE(object.isGenericDict(), path.string(), " holds no dict, but a ", object.tagKind(),
                      "; lockstep::load_python_object() reads it");
  StateDict state;
  for (const auto& item : object.toGenericDict()) {
    LOCKSTEP_CHECK_FILE(item.key().isString(), path.string(),
                        " holds a dict with keys that are no strings, "
                        "but ",
                        item.key().tagKind(), "; lockstep::load_python_object() reads it");
    state.emplace(item.key().toStringRef(), item.value());
  }
  return state;
}

void save_python_object(const IValue& object, const std::filesystem::path& path) {
  FileWriter writer;
  const std::string pickle = writer.finish(object);
  FileReplacement temporary(checkpoint::internal::temporary_name(path));
  OutputFile file(temporary.name());
  write_archive(pickle, writer.storages(), file);
  file.finish(/*sync=*/true);
  checkpoint::internal::check_generation(path);
  if (!temporary.commit(path)) {
    checkpoint::internal::throw_system_error("rename " + temporary.name() + " to", path, errno);
  }
  checkpoint::internal::remove_old_temporaries(path);
  checkpoint::internal::sync_directory(path.has_parent_path() ? path.parent_path() : ".");
}

void save_python_checkpoint(const StateDict& state, const std::filesystem::path& path) {
  save_python_object(to_object(state), path);
}

}  // namespace lockstep

#include <bit>
#include <limits>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/serialization/pickle/writer.h>

static_assert(std::endian::native == std::endian::little, "tensors are pickled as they lie in memory");

namespace lockstep {
namespace {

using c10::IValue;

/// Objects for other processes: tensors with their storages in the pickle.
class ObjectWriter : public pickle::Writer {
 public:
  explicit ObjectWriter(size_t max_bytes) : Writer(/*protocol=*/4, max_bytes) {}

 private:
  at::Tensor to_cpu(const at::Tensor& tensor) const override {
    if (!tensor.is_cpu()) fail("is a tensor on " + tensor.device().str() + "; move it with .cpu() first");
    // Before contiguous() unfolds an expanded one.
    if (tensor.nbytes() > max_bytes()) fail_size();
    return tensor;
  }

  /// The tensor's elements as a torch.storage, in its file format.
  void write_storage(const at::Tensor& dense) override {
    const std::string_view typed = pickle::find_type_name(pickle::kStorageTypes, dense.scalar_type());
    const size_t bytes = dense.nbytes();
    const auto elements = static_cast<int64_t>(typed.empty() ? bytes : dense.numel());
    // PyTorch (2.13) can't read kUntypedStorage back in this place; a storage of bytes does as well.
    const std::string head = storage_head(typed.empty() ? "ByteStorage" : typed, elements);
    put_global("torch.storage", "_load_from_bytes");
    put_sized(head.size() + bytes, {pickle::kShortBinBytes, pickle::kBinBytes, pickle::kBinBytes8});
    put_bytes(head);
    put_bytes({static_cast<const char*>(dense.const_data_ptr()), bytes});
    put(pickle::kTuple1);
    put(pickle::kReduce);
  }

  static std::string storage_head(std::string_view storage_class, int64_t elements) {
    ObjectWriter file(std::numeric_limits<size_t>::max());
    file.put_bytes(pickle::kStorageMagic);
    file.start_storage_pickle();
    file.put_bytes("}(");
    file.write_long_string("protocol_version"), file.write_integer(1001);
    file.write_long_string("little_endian"), file.put(pickle::kNewTrue);
    file.write_long_string("type_sizes"), file.put_bytes("}(");
    file.write_long_string("short"), file.write_integer(2);
    file.write_long_string("int"), file.write_integer(4);
    file.write_long_string("long"), file.write_integer(4);
    file.put_bytes("uu.");
    file.start_storage_pickle();
    file.put(pickle::kMark);
    file.write_long_string("storage");
    file.put_bytes("ctorch\n"), file.put_bytes(storage_class), file.put_bytes("\n");
    file.write_long_string("0"), file.write_long_string("cpu");
    file.write_integer(elements);
    file.put_bytes("NtQ.");
    file.start_storage_pickle();
    file.put_bytes("]"), file.write_long_string("0"), file.put_bytes("a.");
    file.put_raw(elements);
    return file.take_bytes();
  }

  void start_storage_pickle() {
    put(pickle::kProtocol);
    put_raw<uint8_t>(2);
  }
};

}  // namespace

size_t max_object_bytes() {
  constexpr int64_t kDefault = int64_t{1} << 30;
  return static_cast<size_t>(
      environment::integer("LOCKSTEP_MAX_OBJECT_BYTES", 1, int64_t{1} << 46).value_or(kDefault));
}

std::string pickle_object(const IValue& object, size_t max_bytes) {
  return ObjectWriter(max_bytes).finish(object);
}

}  // namespace lockstep

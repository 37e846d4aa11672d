#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/memory.h>
#include <lockstep/base/pickle/format.h>
#include <lockstep/base/pickle/object_pickle.h>

static_assert(std::endian::native == std::endian::little, "tensors are pickled as they lie in memory");

namespace lockstep {
namespace {

using c10::IValue;
using pickle::Opcode;

/// One pickle under construction. Containers and tensors are memoized by identity, so each is written once,
/// however often it occurs.
class Writer {
 public:
  explicit Writer(size_t max_bytes) : max_bytes_(max_bytes) {}

  std::string finish(const IValue& object) {
    put(pickle::kProtocol);
    put_raw<uint8_t>(4);
    write(object);
    put(pickle::kStop);
    return std::move(bytes_);
  }

 private:
  /// A step from a container to its element: a dictionary's key, or an index.
  struct Step {
    const IValue* key;
    size_t index;
  };

  void write(const IValue& value) {
    if (value.isNone()) return put(pickle::kNone);
    if (value.isBool()) return put(value.toBool() ? pickle::kNewTrue : pickle::kNewFalse);
    if (value.isInt()) return write_integer(value.toInt());
    if (value.isDouble()) return write_double(value.toDouble());
    if (value.isComplexDouble()) return write_complex(value.toComplexDouble());
    if (value.isString()) return write_string(value.toStringView());
    if (value.isDevice()) return write_device(value.toDevice());
    if (value.isTensor()) return write_tensor(value.toTensor());
    if (value.isList()) return write_list(value);
    if (value.isGenericDict()) return write_dict(value);
    if (value.isTuple()) return write_tuple(value);
    fail("is of type " + value.tagKind() +
         "; objects consist of None, bool, int, double, complex, string, list, dict, tuple, tensor and "
         "device");
  }

  void write_integer(int64_t value) {
    if (value >= 0 && value <= std::numeric_limits<uint8_t>::max()) {
      put(pickle::kBinInt1);
      put_raw(static_cast<uint8_t>(value));
    } else if (value >= 0 && value <= std::numeric_limits<uint16_t>::max()) {
      put(pickle::kBinInt2);
      put_raw(static_cast<uint16_t>(value));
    } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
      put(pickle::kBinInt);
      put_raw(static_cast<int32_t>(value));
    } else {
      put(pickle::kLong1);
      put_raw<uint8_t>(sizeof(value));
      put_raw(value);
    }
  }

  void write_double(double value) {
    put(pickle::kBinFloat);
    auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) put_raw(static_cast<uint8_t>(bits >> shift));
  }

  void write_complex(c10::complex<double> value) {
    put_global("builtins", "complex");
    write_double(value.real());
    write_double(value.imag());
    put(pickle::kTuple2);
    put(pickle::kReduce);
  }

  void write_device(const c10::Device& device) {
    put_global("torch", "device");
    write_string(device.str());
    put(pickle::kTuple1);
    put(pickle::kReduce);
  }

  void write_string(std::string_view text) {
    if (pickle::is_utf8(text)) {
      put_sized(text.size(), {pickle::kShortBinUnicode, pickle::kBinUnicode, pickle::kBinUnicode8});
    } else {
      put_sized(text.size(), {pickle::kShortBinBytes, pickle::kBinBytes, pickle::kBinBytes8});
    }
    put_bytes(text);
  }

  void write_list(const IValue& value) {
    if (put_container_from_memo(value)) return;
    put(pickle::kEmptyList);
    memoize(value.internalToPointer());
    open_.push_back(value.internalToPointer());
    const auto elements = value.toListRef();
    if (!elements.empty()) {
      put(pickle::kMark);
      for (size_t i = 0; i < elements.size(); ++i) write_element({nullptr, i}, elements[i]);
      put(pickle::kAppends);
    }
    open_.pop_back();
  }

  void write_dict(const IValue& value) {
    if (put_container_from_memo(value)) return;
    put(pickle::kEmptyDict);
    memoize(value.internalToPointer());
    open_.push_back(value.internalToPointer());
    const auto dict = value.toGenericDict();
    if (!dict.empty()) {
      put(pickle::kMark);
      for (const auto& item : dict) write_item(item.key(), item.value());
      put(pickle::kSetItems);
    }
    open_.pop_back();
  }

  void write_item(const IValue& key, const IValue& value) {
    if (!(key.isString() || key.isInt() || key.isBool() || key.isDouble() || key.isComplexDouble())) {
      fail("has a key of type " + key.tagKind() + "; keys are strings, numbers or bools");
    }
    write(key);
    write_element({&key, 0}, value);
  }

  void write_tuple(const IValue& value) {
    if (put_from_memo(value.internalToPointer())) return;
    const auto& elements = value.toTupleRef().elements();
    if (elements.empty()) return put(pickle::kEmptyTuple);
    put(pickle::kMark);
    for (size_t i = 0; i < elements.size(); ++i) write_element({nullptr, i}, elements[i]);
    put(pickle::kTuple);
    memoize(value.internalToPointer());
  }

  void write_element(Step step, const IValue& value) {
    path_.push_back(step);
    if (path_.size() > kMaxObjectDepth) {
      path_.resize(4);  // the first steps say enough
      fail("leads deeper than " + std::to_string(kMaxObjectDepth) +
           " levels; does a container contain itself?");
    }
    write(value);
    path_.pop_back();
  }

  void write_tensor(const at::Tensor& tensor) {
    if (put_from_memo(tensor.unsafeGetTensorImpl())) return;
    check_tensor(tensor);
    at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
    // A view need not carry the rest of its storage, as it would in Python.
    if (!plain.is_non_overlapping_and_dense()) plain = plain.contiguous();
    const std::string_view new_type = find_name(pickle::kNewTypes, plain.scalar_type());
    put_global("torch._utils", new_type.empty() ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    put(pickle::kMark);
    write_storage(plain);
    write_integer(0);  // offset in the storage
    write_integers(plain.sizes());
    write_integers(plain.strides());
    put(pickle::kNewFalse);  // requires_grad
    put_global("collections", "OrderedDict");
    put(pickle::kEmptyTuple);
    put(pickle::kReduce);  // no hooks
    if (!new_type.empty()) put_global("torch", new_type);
    put(pickle::kTuple);
    put(pickle::kReduce);
    memoize(tensor.unsafeGetTensorImpl());
  }

  void check_tensor(const at::Tensor& tensor) const {
    if (!tensor.defined()) fail("is an undefined tensor; send None instead");
    if (!tensor.is_cpu()) fail("is a tensor on " + tensor.device().str() + "; move it with .cpu() first");
    if (tensor.layout() != at::kStrided || tensor.is_nested()) {
      fail("is a sparse, nested or otherwise special tensor; make it dense first");
    }
    const at::ScalarType type = tensor.scalar_type();
    if (find_name(pickle::kStorageTypes, type).empty() && find_name(pickle::kNewTypes, type).empty()) {
      fail(std::string("is a tensor of type ") + c10::toString(type) + ", which can't be pickled");
    }
    // Before contiguous() unfolds an expanded one.
    if (tensor.nbytes() > max_bytes_) fail_size();
  }

  /// The tensor's elements as a torch.storage, in its file format.
  void write_storage(const at::Tensor& dense) {
    const std::string_view typed = find_name(pickle::kStorageTypes, dense.scalar_type());
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
    Writer file(std::numeric_limits<size_t>::max());
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
    return std::move(file.bytes_);
  }

  void start_storage_pickle() {
    put(pickle::kProtocol);
    put_raw<uint8_t>(2);
  }

  /// A string as protocol 2 knows it.
  void write_long_string(std::string_view text) {
    put(pickle::kBinUnicode);
    put_raw(static_cast<uint32_t>(text.size()));
    put_bytes(text);
  }

  void write_integers(at::IntArrayRef values) {
    put(pickle::kMark);
    for (const int64_t value : values) write_integer(value);
    put(pickle::kTuple);
  }

  template <size_t kCount>
  static std::string_view find_name(const std::array<pickle::NamedType, kCount>& names, at::ScalarType type) {
    for (const auto& entry : names) {
      if (entry.type == type) return entry.name;
    }
    return {};
  }

  void put_global(std::string_view module, std::string_view name) {
    if (put_from_memo(name.data())) return;  // names are literals
    write_string(module);
    write_string(name);
    put(pickle::kStackGlobal);
    memoize(name.data());
  }

  void memoize(const void* identity) {
    put(pickle::kMemoize);
    memo_.emplace(identity, static_cast<uint32_t>(memo_.size()));
  }

  bool put_container_from_memo(const IValue& value) {
    if (std::find(open_.begin(), open_.end(), value.internalToPointer()) != open_.end()) {
      fail("is a container that contains itself");
    }
    return put_from_memo(value.internalToPointer());
  }

  /// Writes a reference to what was memoized under the identity; false if nothing was.
  bool put_from_memo(const void* identity) {
    const auto found = memo_.find(identity);
    if (found == memo_.end()) return false;
    if (found->second <= std::numeric_limits<uint8_t>::max()) {
      put(pickle::kBinGet);
      put_raw(static_cast<uint8_t>(found->second));
    } else {
      put(pickle::kLongBinGet);
      put_raw(found->second);
    }
    return true;
  }

  /// The opcodes for lengths of 1, 4 and 8 bytes.
  struct SizedOpcodes {
    Opcode with1, with4, with8;
  };

  void put_sized(size_t size, SizedOpcodes opcodes) {
    if (size <= std::numeric_limits<uint8_t>::max()) {
      put(opcodes.with1);
      put_raw(static_cast<uint8_t>(size));
    } else if (size <= std::numeric_limits<uint32_t>::max()) {
      put(opcodes.with4);
      put_raw(static_cast<uint32_t>(size));
    } else {
      put(opcodes.with8);
      put_raw(static_cast<uint64_t>(size));
    }
  }

  void put(Opcode opcode) { put_raw(static_cast<uint8_t>(opcode)); }

  template <class T>
  void put_raw(T value) {
    put_bytes({reinterpret_cast<const char*>(&value), sizeof(value)});
  }

  void put_bytes(std::string_view bytes) {
    if (bytes.size() > max_bytes_ - bytes_.size()) fail_size();
    bytes_.append(bytes);
  }

  [[noreturn]] void fail_size() const {
    TORCH_CHECK_VALUE(false, "the object's pickle would have more than ",
                      format_bytes(static_cast<int64_t>(max_bytes_)), " (", max_bytes_,
                      " bytes); send less or raise LOCKSTEP_MAX_OBJECT_BYTES on all ranks");
  }

  [[noreturn]] void fail(const std::string& reason) const {
    std::ostringstream place;
    for (const Step& step : path_) {
      if (!step.key) {
        place << '[' << step.index << ']';
      } else if (step.key->isString()) {
        place << "[\"" << step.key->toStringView().substr(0, 100) << "\"]";
      } else {
        place << '[' << *step.key << ']';
      }
    }
    TORCH_CHECK_VALUE(false, "can't pickle the object: ", path_.empty() ? "it" : "its element ", place.str(),
                      " ", reason);
  }

  const size_t max_bytes_;
  std::string bytes_;
  std::unordered_map<const void*, uint32_t> memo_;
  std::vector<Step> path_;
  std::vector<const void*> open_;  // lists and dicts around the place where we are
};

}  // namespace

size_t max_object_bytes() {
  constexpr int64_t kDefault = int64_t{1} << 30;
  return static_cast<size_t>(
      environment::integer("LOCKSTEP_MAX_OBJECT_BYTES", 1, int64_t{1} << 46).value_or(kDefault));
}

std::string pickle_object(const IValue& object, size_t max_bytes) {
  return Writer(max_bytes).finish(object);
}

bool pickle::is_utf8(std::string_view bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<uint8_t>(bytes[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                          : lead >= 0xe0 && lead < 0xf0 ? 3
                                                        : 4;
    if ((length == 4 && (lead < 0xf0 || lead > 0xf4)) || length > bytes.size() - i) return false;
    for (size_t k = 1; k < length; ++k) {
      if ((static_cast<uint8_t>(bytes[i + k]) & 0xc0) != 0x80) return false;
    }
    // Overlong forms, and code points beyond U+10FFFF.
    const uint8_t second = length > 1 ? static_cast<uint8_t>(bytes[i + 1]) : 0;
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90) ||
        (lead == 0xf4 && second > 0x8f)) {
      return false;
    }
    i += length;
  }
  return true;
}

}  // namespace lockstep

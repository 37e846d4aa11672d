#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/base/pickle/format.h>
#include <lockstep/base/pickle/machine.h>
#include <lockstep/base/pickle/object_pickle.h>

namespace lockstep::pickle {
namespace {

using c10::IValue;

/// A file of torch.save's old format that holds one storage. It has persistent ids but no calls, so files
/// within files are no matter.
class StorageReader : Machine {
 public:
  /// The file is bytes[begin, end).
  StorageReader(std::string_view bytes, std::string_view what, size_t begin) : Machine(bytes, what, begin) {}

  /// A tensor of one dimension over the storage.
  at::Tensor read() {
    if (!bytes().substr(position()).starts_with(kStorageMagic))
      fail("a storage that torch.save did not write");
    take(kStorageMagic.size());
    check_machine(run());
    if (run().kind != Slot::Kind::kStorage) fail("bytes that hold something else than a storage");
    check_keys(run());
    if (take_raw<uint64_t>() != static_cast<uint64_t>(elements_)) fail("a storage with two sizes");
    const auto elements = take(static_cast<size_t>(elements_) * c10::elementSize(type_));
    if (!at_end()) fail("a storage that ends before its bytes do");
    return copy(elements);
  }

 private:
  void call(Global, const std::vector<Slot>&) override { fail("a call within a storage"); }

  /// ("storage", class, key, location, number of elements, None)
  void load_persistent(const Slot& id) override {
    const auto* parts = elements_of_tuple(id);
    if (!parts || parts->size() != 6) fail("a storage of unknown form");
    const IValue kind = value_of((*parts)[0]), key = value_of((*parts)[2]), location = value_of((*parts)[3]);
    const IValue elements = value_of((*parts)[4]), view = value_of((*parts)[5]);
    if (!kind.isString() || kind.toStringView() != "storage" || !key.isString() || !location.isString() ||
        !elements.isInt() || !view.isNone()) {
      fail("a storage of unknown form");
    }
    if (location.toStringView() != "cpu") {
      fail("a tensor on " + std::string(location.toStringView().substr(0, 100)) + "; send it from the CPU");
    }
    type_ = storage_type((*parts)[1]);
    elements_ = elements.toInt();
    if (elements_ < 0 || static_cast<uint64_t>(elements_) > bytes().size() / c10::elementSize(type_)) {
      fail("a storage that is larger than its bytes");
    }
    key_ = key;
    push_slot({Slot::Kind::kStorage, 0, {}});
  }

  at::ScalarType storage_type(const Slot& slot) const {
    const size_t index = slot.index - static_cast<uint32_t>(Global::kStorageClasses);
    if (slot.kind != Slot::Kind::kGlobal || index > kStorageTypes.size()) fail("a storage of unknown type");
    return index < kStorageTypes.size() ? kStorageTypes[index].type : at::kByte;
  }

  void check_machine(const Slot& slot) {
    const IValue machine = value_of(slot);
    if (!machine.isGenericDict()) fail("a storage without the properties of its machine");
    const auto properties = machine.toGenericDict();
    const auto little_endian = properties.find("little_endian");
    if (little_endian == properties.end() || !little_endian->value().isBool() ||
        !little_endian->value().toBool()) {
      fail("a storage of a big-endian machine");
    }
  }

  void check_keys(const Slot& slot) {
    const IValue keys = value_of(slot);
    if (!keys.isList() || keys.toListRef().size() != 1 || !keys.toListRef()[0].isString() ||
        keys.toListRef()[0].toStringView() != key_.toStringView()) {
      fail("a storage without its key");
    }
  }

  at::Tensor copy(std::string_view elements) const {
    // A bool of any other value would be undefined behaviour where it is read.
    if (type_ == at::kBool && std::any_of(elements.begin(), elements.end(),
                                          [](char value) { return static_cast<uint8_t>(value) > 1; })) {
      fail("a bool that is neither true nor false");
    }
    at::Tensor tensor = at::empty({elements_}, type_);
    if (!elements.empty()) std::memcpy(tensor.mutable_data_ptr(), elements.data(), elements.size());
    return tensor;
  }

  at::ScalarType type_ = at::kByte;
  int64_t elements_ = 0;
  IValue key_;
};

/// Whether all elements of a tensor lie in a storage of `elements`.
bool fits(int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
          int64_t elements) {
  if (offset < 0 || offset > elements || sizes.size() != strides.size()) return false;
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  int64_t count = 1;
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(count, std::max<int64_t>(sizes[i], 1), &count) ||
        __builtin_mul_overflow(std::max<int64_t>(sizes[i] - 1, 0), strides[i], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  constexpr int64_t kLargestElement = 16;  // the number of bytes must be a number, too
  return count <= std::numeric_limits<int64_t>::max() / kLargestElement && (empty || last < elements);
}

/// The object of a pickle.
class ObjectReader : Machine {
 public:
  ObjectReader(std::string_view bytes, std::string_view what)
      : Machine(bytes, what, 0), storage_budget_(bytes.size()) {}

  IValue read() {
    const Slot result = run();
    if (!at_end()) fail("the pickle ends before its bytes do");
    return value_of(result);
  }

 private:
  void load_persistent(const Slot&) override { fail_unknown("a persistent id"); }

  void call(Global function, const std::vector<Slot>& arguments) override {
    switch (function) {
      case Global::kLoadFromBytes:
        return push_storage(arguments);
      case Global::kRebuildTensorV2:
        return push_tensor(arguments, 6);
      case Global::kRebuildTensorV3:
        return push_tensor(arguments, 7);
      case Global::kRebuildParameter:
        return push_parameter(arguments);
      case Global::kOrderedDict:
        if (!arguments.empty()) fail("an OrderedDict with arguments");
        container(push_container(Container::Type::kDict)).ordered = true;
        return;
      case Global::kCounter:
        if (arguments.size() != 1 || !value_of(arguments[0]).isGenericDict())
          fail("a Counter without counts");
        return push_slot(arguments[0]);
      case Global::kSize:
        if (arguments.size() != 1 || !value_of(arguments[0]).isTuple())
          fail("a torch.Size without its tuple");
        return push_slot(arguments[0]);
      case Global::kComplex:
        return push_complex(arguments);
      case Global::kDevice:
        return push_device(arguments);
      default:
        fail("a call of a type");
    }
  }

  void push_complex(const std::vector<Slot>& arguments) {
    if (arguments.size() != 2) fail("a complex number without two floats");
    const IValue real = value_of(arguments[0]), imaginary = value_of(arguments[1]);
    if (!real.isDouble() || !imaginary.isDouble()) fail("a complex number without two floats");
    push(c10::complex<double>(real.toDouble(), imaginary.toDouble()));
  }

  void push_device(const std::vector<Slot>& arguments) {
    const IValue type = arguments.empty() ? IValue() : value_of(arguments[0]);
    const IValue index = arguments.size() == 2 ? value_of(arguments[1]) : IValue();
    if (!type.isString() || arguments.size() > 2 || (arguments.size() == 2 && !index.isInt())) {
      fail("a torch.device without type and index");
    }
    const std::string name =
        type.toStringRef().substr(0, 100) + (index.isInt() ? ":" + std::to_string(index.toInt()) : "");
    std::optional<c10::Device> device;
    try {
      device.emplace(name);
    } catch (const std::exception&) {
      fail("the device '" + name + "', which torch does not know");
    }
    push(*device);
  }

  void push_storage(const std::vector<Slot>& arguments) {
    if (arguments.size() != 1 || arguments[0].kind != Slot::Kind::kBytes) fail("a storage without its bytes");
    const std::string_view file = piece(arguments[0]);
    // A few bytes can name the same storage again and again; each byte of the input is read once at most.
    if (file.size() > storage_budget_) fail("a storage that occurs several times");
    storage_budget_ -= file.size();
    const auto begin = static_cast<size_t>(file.data() - bytes().data());
    push_slot({Slot::Kind::kStorage, 0,
               StorageReader(bytes().substr(0, begin + file.size()), what(), begin).read()});
  }

  void push_parameter(const std::vector<Slot>& arguments) {
    const IValue tensor = arguments.size() == 3 ? value_of(arguments[0]) : IValue();
    if (!tensor.isTensor()) fail("a parameter without its tensor");
    push(tensor);
  }

  /// Arguments: storage, offset, sizes, strides, requires_grad, hooks, with v3 the dtype; perhaps metadata
  /// behind these `count`.
  void push_tensor(const std::vector<Slot>& arguments, size_t count) {
    if (arguments.size() != count && arguments.size() != count + 1) fail("a tensor of unknown form");
    if (arguments[0].kind != Slot::Kind::kStorage) fail("a tensor without its storage");
    check_properties(arguments, count);
    const at::Tensor storage = arguments[0].value.toTensor();
    const at::ScalarType type = count == 7 ? new_type(arguments[6]) : storage.scalar_type();
    const auto elements = static_cast<int64_t>(storage.nbytes() / c10::elementSize(type));
    const IValue offset = value_of(arguments[1]);
    const auto sizes = to_integers(arguments[2]);
    const auto strides = to_integers(arguments[3]);
    if (!offset.isInt() || !fits(offset.toInt(), sizes, strides, elements)) {
      fail("a tensor that does not fit into its storage of " + std::to_string(elements) + " elements");
    }
    push(at::empty({0}, type).set_(storage.storage(), offset.toInt(), sizes, strides));
  }

  void check_properties(const std::vector<Slot>& arguments, size_t count) {
    const auto is_empty_dict = [](const IValue& value) {
      return value.isGenericDict() && value.toGenericDict().empty();
    };
    if (!value_of(arguments[4]).isBool() || !is_empty_dict(value_of(arguments[5])))
      fail("a tensor with hooks");
    if (arguments.size() == count) return;
    const IValue metadata = value_of(arguments[count]);
    if (!metadata.isNone() && !is_empty_dict(metadata)) {
      fail("a conjugated or negated view; send .resolve_conj().resolve_neg()");
    }
  }

  at::ScalarType new_type(const Slot& slot) const {
    const size_t index = slot.index - static_cast<uint32_t>(Global::kDtypes);
    if (slot.kind != Slot::Kind::kGlobal || index >= kNewTypes.size()) fail("a tensor without a known dtype");
    return kNewTypes[index].type;
  }

  std::vector<int64_t> to_integers(const Slot& slot) {
    const IValue value = value_of(slot);
    constexpr size_t kMostDimensions = 64;  // torch's own limit for most operations
    if (!value.isTuple() || value.toTupleRef().elements().size() > kMostDimensions) {
      fail("a tensor whose sizes or strides are no tuple of at most 64");
    }
    std::vector<int64_t> integers;
    for (const IValue& element : value.toTupleRef().elements()) {
      if (!element.isInt() || element.toInt() < 0) fail("a tensor with a size or stride that is no number");
      integers.push_back(element.toInt());
    }
    return integers;
  }

  size_t storage_budget_;
};

}  // namespace
}  // namespace lockstep::pickle

namespace lockstep {

c10::IValue unpickle_object(std::string_view bytes, std::string_view what) {
  return pickle::ObjectReader(bytes, what).read();
}

}  // namespace lockstep

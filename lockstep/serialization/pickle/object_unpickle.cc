#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/serialization/pickle/format.h>
#include <lockstep/serialization/pickle/machine.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/serialization/pickle/object_reader.h>

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
    const auto type = storage_type((*parts)[1]);
    if (!type) fail("a storage of unknown type");
    type_ = *type;
    elements_ = elements.toInt();
    if (elements_ < 0 || static_cast<uint64_t>(elements_) > bytes().size() / c10::elementSize(type_)) {
      fail("a storage that is larger than its bytes");
    }
    key_ = key;
    push_slot({Slot::Kind::kStorage, 0, {}});
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
    if (type_ == at::kBool && !are_bools(elements)) fail("a bool that is neither true nor false");
    at::Tensor tensor = at::empty({elements_}, type_);
    if (!elements.empty()) std::memcpy(tensor.mutable_data_ptr(), elements.data(), elements.size());
    return tensor;
  }

  at::ScalarType type_ = at::kByte;
  int64_t elements_ = 0;
  IValue key_;
};

/// An object from another process: storages lie in the pickle.
class MessageReader : public ObjectReader {
 public:
  MessageReader(std::string_view bytes, std::string_view what)
      : ObjectReader(bytes, what), storage_budget_(bytes.size()) {}

 private:
  void load_from_bytes(const std::vector<Slot>& arguments) override {
    if (arguments.size() != 1 || arguments[0].kind != Slot::Kind::kBytes) fail("a storage without its bytes");
    const std::string_view file = piece(arguments[0]);
    // A few bytes can name the same storage again and again; each byte of the input is read once at most.
    if (file.size() > storage_budget_) fail("a storage that occurs several times");
    storage_budget_ -= file.size();
    const auto begin = static_cast<size_t>(file.data() - bytes().data());
    push_slot({Slot::Kind::kStorage, 0,
               StorageReader(bytes().substr(0, begin + file.size()), what(), begin).read()});
  }

  size_t storage_budget_;
};

}  // namespace
}  // namespace lockstep::pickle

namespace lockstep {

c10::IValue unpickle_object(std::string_view bytes, std::string_view what) {
  return pickle::MessageReader(bytes, what).read();
}

}  // namespace lockstep

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/serialization/parse_device.h>
#include <lockstep/serialization/pickle/format.h>
#include <lockstep/serialization/pickle/object_reader.h>

namespace lockstep::pickle {
namespace {

using c10::IValue;

constexpr int64_t kMostElements = std::numeric_limits<int64_t>::max() / 16;  // bytes must have a number, too

/// Whether all elements of a tensor lie in a storage of `elements`. An empty one may begin beyond its end.
bool fits(int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
          int64_t elements) {
  if (offset < 0 || offset > kMostElements || sizes.size() != strides.size()) return false;
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
  return count <= kMostElements && (empty || last < elements);
}

}  // namespace

IValue ObjectReader::read() {
  const Slot result = run();
  if (!at_end()) fail("the pickle ends before its bytes do");
  return value_of(result);
}

void ObjectReader::load_persistent(const Slot& /*unused*/) {
  fail_unknown("a persistent id");
}

void ObjectReader::load_from_bytes(const std::vector<Slot>& /*unused*/) {
  fail("a storage within the pickle");
}

void ObjectReader::call(Global function, const std::vector<Slot>& arguments) {
  switch (function) {
    case Global::kLoadFromBytes:
      return load_from_bytes(arguments);
    case Global::kRebuildTensorV2:
      return push_tensor(arguments, 6);
    case Global::kRebuildTensorV3:
      return push_tensor(arguments, 7);
    case Global::kRebuildParameter:
      return push_parameter(arguments, 3);
    case Global::kRebuildParameterWithState:
      return push_parameter(arguments, 4);
    case Global::kRebuildFromType:
      return push_with_attributes(arguments);
    case Global::kEncode:
      return push_encoded(arguments);
    case Global::kBytes:  // protocol 2's empty ones
      if (!arguments.empty()) fail("bytes with arguments");
      return push(std::string());
    case Global::kOrderedDict:
      if (!arguments.empty()) fail("an OrderedDict with arguments");
      container(push_container(Container::Type::kDict)).ordered = true;
      return;
    case Global::kCounter:
      if (arguments.size() != 1 || !value_of(arguments[0]).isGenericDict()) fail("a Counter without counts");
      return push_slot(arguments[0]);
    case Global::kSize:
      if (arguments.size() != 1 || !value_of(arguments[0]).isTuple()) fail("a torch.Size without its tuple");
      return push_slot(arguments[0]);
    case Global::kComplex:
      return push_complex(arguments);
    case Global::kDevice:
      return push_device(arguments);
    default:
      fail("a call of a type");
  }
}

void ObjectReader::push_complex(const std::vector<Slot>& arguments) {
  if (arguments.size() != 2) fail("a complex number without two floats");
  const IValue real = value_of(arguments[0]), imaginary = value_of(arguments[1]);
  if (!real.isDouble() || !imaginary.isDouble()) fail("a complex number without two floats");
  push(c10::complex<double>(real.toDouble(), imaginary.toDouble()));
}

void ObjectReader::push_device(const std::vector<Slot>& arguments) {
  const IValue type = arguments.empty() ? IValue() : value_of(arguments[0]);
  const IValue index = arguments.size() == 2 ? value_of(arguments[1]) : IValue();
  if (!type.isString() || arguments.size() > 2 || (arguments.size() == 2 && !index.isInt())) {
    fail("a torch.device without type and index");
  }
  const std::string name =
      type.toStringRef().substr(0, 100) + (index.isInt() ? ":" + std::to_string(index.toInt()) : "");
  const auto device = serialization::parse_device(name);
  if (!device) fail("the device '" + name + "', which torch does not know");
  push(*device);
}

/// Arguments: a function, a type, the function's arguments, attributes that Python code gave the tensor,
/// which are left out.
void ObjectReader::push_with_attributes(const std::vector<Slot>& arguments) {
  const auto is_global = [&](size_t i, Global wanted) {
    return arguments[i].kind == Slot::Kind::kGlobal && static_cast<Global>(arguments[i].index) == wanted;
  };
  const auto* elements = arguments.size() == 4 ? elements_of_tuple(arguments[2]) : nullptr;
  if (!elements || !is_global(1, Global::kTensor)) fail("a tensor with attributes, of unknown form");
  const bool is_v3 = is_global(0, Global::kRebuildTensorV3);
  if (!is_v3 && !is_global(0, Global::kRebuildTensorV2)) fail("a tensor with attributes, of unknown form");
  push_tensor(std::vector<Slot>(*elements), is_v3 ? 7 : 6);
}

void ObjectReader::push_parameter(const std::vector<Slot>& arguments, size_t count) {
  const IValue tensor = arguments.size() == count ? value_of(arguments[0]) : IValue();
  if (!tensor.isTensor()) fail("a parameter without its tensor");
  push(tensor);
}

/// _codecs.encode(text, "latin1"): how protocol 2 writes bytes.
void ObjectReader::push_encoded(const std::vector<Slot>& arguments) {
  const IValue text = arguments.empty() ? IValue() : value_of(arguments[0]);
  const IValue encoding = arguments.size() == 2 ? value_of(arguments[1]) : IValue();
  if (!text.isString() || !encoding.isString() || encoding.toStringView() != "latin1") {
    fail("bytes in an unknown encoding");
  }
  // A few bytes can name the same text again and again.
  if (text.toStringView().size() > encoded_budget_) fail("bytes that occur several times");
  encoded_budget_ -= text.toStringView().size();
  const auto bytes = utf8_to_latin1(text.toStringView());
  if (!bytes) fail("bytes with characters beyond Latin-1");
  push(*bytes);
}

/// Arguments: storage, offset, sizes, strides, requires_grad, hooks, with v3 the dtype; perhaps metadata
/// after these `count`.
void ObjectReader::push_tensor(const std::vector<Slot>& arguments, size_t count) {
  if (arguments.size() != count && arguments.size() != count + 1) fail("a tensor of unknown form");
  if (arguments[0].kind != Slot::Kind::kStorage) fail("a tensor without its storage");
  check_properties(arguments);
  const at::Tensor storage = arguments[0].value.toTensor();
  const at::ScalarType type = count == 7 ? new_type(arguments[6]) : storage.scalar_type();
  const auto elements = static_cast<int64_t>(storage.nbytes() / c10::elementSize(type));
  const IValue offset = value_of(arguments[1]);
  const auto sizes = to_integers(arguments[2]);
  const auto strides = to_integers(arguments[3]);
  if (!offset.isInt() || !fits(offset.toInt(), sizes, strides, elements)) {
    fail("a tensor that does not fit into its storage of " + std::to_string(elements) + " elements");
  }
  const at::Tensor tensor = at::empty({0}, type).set_(storage.storage(), offset.toInt(), sizes, strides);
  if (arguments.size() > count) set_metadata(tensor, value_of(arguments[count]));
  push(tensor);
}

/// Lazy views: {"conj": True, "neg": True}, either or both. torch/csrc/jit/serialization/pickler_helper.h.
void ObjectReader::set_metadata(const at::Tensor& tensor, const IValue& metadata) {
  if (metadata.isNone()) return;
  if (!metadata.isGenericDict()) fail("a tensor with unknown metadata");
  const at::ScalarType type = tensor.scalar_type();
  const bool can_be_negated =
      tensor.is_complex() ||
      (type != at::kBool && std::any_of(kStorageTypes.begin(), kStorageTypes.end(),
                                        [&](const auto& each) { return each.type == type; }));
  const auto dict = metadata.toGenericDict();
  for (const auto& entry : dict) {
    const bool is_mark = entry.key().isString() && entry.value().isBool();
    const std::string_view name = is_mark ? entry.key().toStringView() : std::string_view();
    if (name == "conj" && tensor.is_complex()) {
      tensor._set_conj(entry.value().toBool());
    } else if (name == "neg" && can_be_negated) {
      tensor._set_neg(entry.value().toBool());
    } else {
      fail("a tensor with unknown metadata");
    }
  }
}

void ObjectReader::check_properties(const std::vector<Slot>& arguments) {
  const auto is_empty_dict = [](const IValue& value) {
    return value.isGenericDict() && value.toGenericDict().empty();
  };
  if (!value_of(arguments[4]).isBool() || !is_empty_dict(value_of(arguments[5]))) fail("a tensor with hooks");
}

at::ScalarType ObjectReader::new_type(const Slot& slot) const {
  const size_t index = slot.index - static_cast<uint32_t>(Global::kDtypes);
  if (slot.kind != Slot::Kind::kGlobal || index >= kNewTypes.size()) fail("a tensor without a known dtype");
  return kNewTypes[index].type;
}

std::vector<int64_t> ObjectReader::to_integers(const Slot& slot) {
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

}  // namespace lockstep::pickle

#include <algorithm>
#include <bit>
#include <limits>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/serialization/pickle/writer.h>

namespace lockstep::pickle {

using c10::IValue;

std::string Writer::finish(const IValue& object) {
  put(kProtocol);
  put_raw(static_cast<uint8_t>(protocol_));
  write(object);
  put(kStop);
  return std::move(bytes_);
}

void Writer::write(const IValue& value) {
  if (value.isNone()) return put(kNone);
  if (value.isBool()) return put(value.toBool() ? kNewTrue : kNewFalse);
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

void Writer::write_integer(int64_t value) {
  if (value >= 0 && value <= std::numeric_limits<uint8_t>::max()) {
    put(kBinInt1);
    put_raw(static_cast<uint8_t>(value));
  } else if (value >= 0 && value <= std::numeric_limits<uint16_t>::max()) {
    put(kBinInt2);
    put_raw(static_cast<uint16_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    put(kBinInt);
    put_raw(static_cast<int32_t>(value));
  } else {
    put(kLong1);
    put_raw<uint8_t>(sizeof(value));
    put_raw(value);
  }
}

void Writer::write_double(double value) {
  put(kBinFloat);
  auto bits = std::bit_cast<uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) put_raw(static_cast<uint8_t>(bits >> shift));
}

void Writer::write_complex(c10::complex<double> value) {
  put_global("builtins", "complex");
  write_double(value.real());
  write_double(value.imag());
  put(kTuple2);
  put(kReduce);
}

void Writer::write_device(const c10::Device& device) {
  put_global("torch", "device");
  write_string(device.str());
  put(kTuple1);
  put(kReduce);
}

void Writer::write_list(const IValue& value) {
  if (put_container_from_memo(value)) return;
  put(kEmptyList);
  memoize(value.internalToPointer());
  open_.push_back(value.internalToPointer());
  const auto elements = value.toListRef();
  if (!elements.empty()) {
    put(kMark);
    for (size_t i = 0; i < elements.size(); ++i) write_element({nullptr, i}, elements[i]);
    put(kAppends);
  }
  open_.pop_back();
}

void Writer::write_dict(const IValue& value) {
  if (put_container_from_memo(value)) return;
  put(kEmptyDict);
  memoize(value.internalToPointer());
  open_.push_back(value.internalToPointer());
  const auto dict = value.toGenericDict();
  if (!dict.empty()) {
    put(kMark);
    for (const auto& item : dict) write_item(item.key(), item.value());
    put(kSetItems);
  }
  open_.pop_back();
}

void Writer::write_item(const IValue& key, const IValue& value) {
  if (!(key.isString() || key.isInt() || key.isBool() || key.isDouble() || key.isComplexDouble())) {
    fail("has a key of type " + key.tagKind() + "; keys are strings, numbers or bools");
  }
  write(key);
  write_element({&key, 0}, value);
}

void Writer::write_tuple(const IValue& value) {
  if (put_from_memo(value.internalToPointer())) return;
  const auto& elements = value.toTupleRef().elements();
  if (elements.empty()) return put(kEmptyTuple);
  put(kMark);
  for (size_t i = 0; i < elements.size(); ++i) write_element({nullptr, i}, elements[i]);
  put(kTuple);
  memoize(value.internalToPointer());
}

void Writer::write_element(Step step, const IValue& value) {
  path_.push_back(step);
  if (path_.size() > kMaxObjectDepth) {
    path_.resize(4);  // the first steps say enough
    fail("leads deeper than " + std::to_string(kMaxObjectDepth) +
         " levels; does a container contain itself?");
  }
  write(value);
  path_.pop_back();
}

void Writer::write_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) fail("is an undefined tensor; send None instead");
  if (put_from_memo(tensor.unsafeGetTensorImpl())) return;
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    fail("is a sparse, nested or otherwise special tensor; make it dense first");
  }
  const at::ScalarType type = tensor.scalar_type();
  const std::string_view new_type = find_type_name(kNewTypes, type);
  if (find_type_name(kStorageTypes, type).empty() && new_type.empty()) {
    fail(std::string("is a tensor of type ") + c10::toString(type) + ", which can't be pickled");
  }
  at::Tensor plain = to_cpu(tensor.detach()).resolve_conj().resolve_neg();
  // A view need not carry the rest of its storage, as it would in Python.
  if (!plain.is_non_overlapping_and_dense()) plain = plain.contiguous();
  put_global("torch._utils", new_type.empty() ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  put(kMark);
  write_storage(plain);
  write_integer(0);  // offset in the storage
  write_integers(plain.sizes());
  write_integers(plain.strides());
  put(kNewFalse);  // requires_grad
  put_global("collections", "OrderedDict");
  put(kEmptyTuple);
  put(kReduce);  // no hooks
  if (!new_type.empty()) put_global("torch", new_type);
  put(kTuple);
  put(kReduce);
  memoize(tensor.unsafeGetTensorImpl());
}

void Writer::write_integers(at::IntArrayRef values) {
  put(kMark);
  for (const int64_t value : values) write_integer(value);
  put(kTuple);
}

bool Writer::put_container_from_memo(const IValue& value) {
  if (std::find(open_.begin(), open_.end(), value.internalToPointer()) != open_.end()) {
    fail("is a container that contains itself");
  }
  return put_from_memo(value.internalToPointer());
}

bool Writer::put_from_memo(const void* identity) {
  const auto found = memo_.find(identity);
  if (found == memo_.end()) return false;
  if (found->second <= std::numeric_limits<uint8_t>::max()) {
    put(kBinGet);
    put_raw(static_cast<uint8_t>(found->second));
  } else {
    put(kLongBinGet);
    put_raw(found->second);
  }
  return true;
}

void Writer::fail(const std::string& reason) const {
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

void Writer::write_string(std::string_view text) {
  const bool is_text = is_utf8(text);
  if (protocol_ >= 4) {
    put_sized(text.size(), is_text ? SizedOpcodes{kShortBinUnicode, kBinUnicode, kBinUnicode8}
                                   : SizedOpcodes{kShortBinBytes, kBinBytes, kBinBytes8});
    put_bytes(text);
  } else if (is_text) {
    write_long_string(text);
  } else {  // as Python does, where a protocol has no bytes
    put_global("_codecs", "encode");
    write_long_string(latin1_to_utf8(text));
    write_long_string("latin1");
    put(kTuple2);
    put(kReduce);
  }
}

void Writer::write_long_string(std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) fail("is a string of more than 4 GiB");
  put(kBinUnicode);
  put_raw(static_cast<uint32_t>(text.size()));
  put_bytes(text);
}

void Writer::put_global(std::string_view module, std::string_view name) {
  if (put_from_memo(name.data())) return;  // names are literals
  if (protocol_ >= 4) {
    write_string(module);
    write_string(name);
    put(kStackGlobal);
  } else {
    put(kGlobal);
    put_bytes(module), put_bytes("\n");
    put_bytes(name), put_bytes("\n");
  }
  memoize(name.data());
}

void Writer::memoize(const void* identity) {
  const auto index = static_cast<uint32_t>(memo_.size());
  if (protocol_ >= 4) {
    put(kMemoize);
  } else if (index <= std::numeric_limits<uint8_t>::max()) {
    put(kBinPut);
    put_raw(static_cast<uint8_t>(index));
  } else {
    put(kLongBinPut);
    put_raw(index);
  }
  memo_.emplace(identity, index);
}

void Writer::put_sized(size_t size, SizedOpcodes opcodes) {
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

void Writer::put_bytes(std::string_view bytes) {
  if (bytes.size() > max_bytes_ - bytes_.size()) fail_size();
  bytes_.append(bytes);
}

void Writer::fail_size() const {
  TORCH_CHECK_VALUE(false, "the object's pickle would have more than ",
                    format_bytes(static_cast<int64_t>(max_bytes_)), " (", max_bytes_,
                    " bytes); send less or raise LOCKSTEP_MAX_OBJECT_BYTES on all ranks");
}

std::string_view find_type_name(std::span<const NamedType> names, at::ScalarType type) {
  for (const auto& entry : names) {
    if (entry.type == type) return entry.name;
  }
  return {};
}

}  // namespace lockstep::pickle

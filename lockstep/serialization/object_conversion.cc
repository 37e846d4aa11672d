#include <ATen/core/jit_type.h>

#include <lockstep/serialization/object_conversion.h>

namespace lockstep::serialization {

void throw_wrong_object(std::string_view wanted, const c10::IValue& object) {
  TORCH_CHECK_VALUE(false, "from_object: ", wanted, " was wanted, but the object is of type ",
                    object.tagKind());
}

c10::impl::GenericList make_object_list(size_t capacity) {
  c10::impl::GenericList list(c10::AnyType::get());
  list.reserve(capacity);
  return list;
}

c10::impl::GenericDict make_object_dict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

c10::ArrayRef<c10::IValue> elements_of(const c10::IValue& object, std::optional<size_t> size) {
  if (!object.isList() && !object.isTuple()) throw_wrong_object("a list or tuple", object);
  const c10::ArrayRef<c10::IValue> elements =
      object.isList() ? object.toListRef() : object.toTupleRef().elements().asArrayRef();
  TORCH_CHECK_VALUE(!size || elements.size() == *size, "from_object: ", size.value_or(0),
                    " elements were wanted, but there are ", elements.size());
  return elements;
}

}  // namespace lockstep::serialization

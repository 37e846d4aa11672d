#include <mutex>
#include <unordered_set>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/class_type.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <lockstep/base/tensor_tree.h>

namespace lockstep::internal {
namespace {

/// The objects that were looked into, for they may hold themselves; none is looked into if not `enabled`.
struct Objects {
  bool enabled;
  std::unordered_set<const void*> seen;
};

bool is_plain_list(const c10::IValue& value) {
  return value.isIntList() || value.isDoubleList() || value.isBoolList() || value.isComplexDoubleList();
}

/// A TorchScript class's object that is searched: a module's tensors are not its user's output.
bool is_new_object(const c10::IValue& value, Objects& objects) {
  if (!objects.enabled || !value.isObject() || value.toObjectRef().type()->is_module()) return false;
  return objects.seen.insert(&value.toObjectRef()).second;
}

/// A tuple makes its type at the first call, without a lock; and replicas walk one input in threads of theirs.
c10::TupleTypePtr type_of(const c10::ivalue::Tuple& tuple) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return tuple.type<c10::TupleType>();
}

void look(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit, Objects& objects) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (is_new_object(value, objects)) {
    for (const auto& slot : value.toObjectRef().slots()) look(slot, visit, objects);
  } else if (!is_plain_list(value)) {
    for (const auto& part : parts_of(value)) look(part, visit, objects);
  }
}

void exchange(c10::IValue& value, c10::function_ref<void(at::Tensor&)> visit, Objects& objects) {
  if (value.isTensor()) {
    at::Tensor tensor = std::move(value).toTensor();
    visit(tensor);
    value = std::move(tensor);
  } else if (is_new_object(value, objects)) {
    const auto object = value.toObject();
    for (size_t i = 0; i < object->slots().size(); ++i) {
      c10::IValue slot = object->getSlot(i);
      exchange(slot, visit, objects);
      object->setSlot(i, std::move(slot));
    }
  } else if (value.isTuple() || value.isGenericDict() || (value.isList() && !is_plain_list(value))) {
    auto parts = parts_of(value);
    for (auto& part : parts) exchange(part, visit, objects);
    value = with_parts(value, std::move(parts));  // an empty one too: others that share it may fill theirs
  }
}

}  // namespace

std::vector<c10::IValue> parts_of(const c10::IValue& value) {
  std::vector<c10::IValue> parts;
  if (value.isTuple()) {
    parts.assign(value.toTupleRef().elements().begin(), value.toTupleRef().elements().end());
  } else if (value.isList()) {
    parts.assign(value.toListRef().begin(), value.toListRef().end());
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) parts.push_back(item.value());
  }
  return parts;
}

c10::IValue with_parts(const c10::IValue& value, std::vector<c10::IValue> parts) {
  if (value.isTuple()) {
    const c10::TupleTypePtr type = type_of(value.toTupleRef());
    return type->schema() ? c10::ivalue::Tuple::createNamed(std::move(parts), type)
                          : c10::ivalue::Tuple::create(std::move(parts));
  }
  auto part = parts.begin();
  if (value.isList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, std::move(*part++));
    return list;
  }
  auto dict = value.toGenericDict().copy();
  for (const auto& item : dict) item.setValue(std::move(*part++));
  return dict;
}

void walk_ivalue(c10::IValue& value, bool through_objects, c10::function_ref<void(at::Tensor&)> visit) {
  Objects objects{through_objects, {}};
  exchange(value, visit, objects);
}

void walk_ivalue(const c10::IValue& value, bool through_objects,
                 c10::function_ref<void(const at::Tensor&)> visit) {
  Objects objects{through_objects, {}};
  look(value, visit, objects);
}

}  // namespace lockstep::internal

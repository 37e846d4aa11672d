#include <unordered_set>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/class_type.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <lockstep/base/tensor_tree.h>

namespace lockstep::detail {
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

void look(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit, Objects& objects) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) look(element, visit, objects);
  } else if (value.isList() && !is_plain_list(value)) {
    for (const c10::IValue& element : value.toListRef()) look(element, visit, objects);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) look(item.value(), visit, objects);
  } else if (is_new_object(value, objects)) {
    for (const auto& slot : value.toObjectRef().slots()) look(slot, visit, objects);
  }
}

void exchange(c10::IValue& value, c10::function_ref<void(at::Tensor&)> visit, Objects& objects) {
  if (value.isTensor()) {
    at::Tensor tensor = std::move(value).toTensor();
    visit(tensor);
    value = std::move(tensor);
  } else if (value.isTuple()) {
    const auto tuple = value.toTuple();
    std::vector<c10::IValue> elements(tuple->elements().begin(), tuple->elements().end());
    for (auto& element : elements) exchange(element, visit, objects);
    const auto type = tuple->type<c10::TupleType>();
    value = type->schema() ? c10::ivalue::Tuple::createNamed(std::move(elements), type)
                           : c10::ivalue::Tuple::create(std::move(elements));
  } else if (value.isList() && !is_plain_list(value)) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      c10::IValue element = list.get(i);
      exchange(element, visit, objects);
      list.set(i, std::move(element));
    }
    value = std::move(list);
  } else if (value.isGenericDict()) {
    auto dict = value.toGenericDict().copy();
    for (const auto& item : dict) {
      c10::IValue element = item.value();
      exchange(element, visit, objects);
      item.setValue(std::move(element));
    }
    value = std::move(dict);
  } else if (is_new_object(value, objects)) {
    const auto object = value.toObject();
    for (size_t i = 0; i < object->slots().size(); ++i) {
      c10::IValue slot = object->getSlot(i);
      exchange(slot, visit, objects);
      object->setSlot(i, std::move(slot));
    }
  }
}

}  // namespace

void walk_ivalue(c10::IValue& value, bool through_objects, c10::function_ref<void(at::Tensor&)> visit) {
  Objects objects{through_objects, {}};
  exchange(value, visit, objects);
}

void walk_ivalue(const c10::IValue& value, bool through_objects,
                 c10::function_ref<void(const at::Tensor&)> visit) {
  Objects objects{through_objects, {}};
  look(value, visit, objects);
}

}  // namespace lockstep::detail

#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/FunctionRef.h>

/// The tensors in a nest of anything: a module's arguments and outputs, batches. What PyTorch does with
/// torch/utils/_pytree.py and _find_tensors of torch/nn/parallel/distributed.py, decided by types while
/// compiling.
///
/// Searched are tensors, std::optional, pairs, tuples, arrays, vectors and all other ranges, the values of
/// maps and of torch::OrderedDict, c10::List, c10::Dict, c10::IValue with all that is nested in it, variants,
/// packed sequences, and what pointers and std::reference_wrapper lead to. Numbers, enums, strings and other
/// trivially copyable data hold none. A struct of your own says what it has, once, in one of two ways:
///
///     struct Output {
///       torch::Tensor logits;
///       std::vector<torch::Tensor> hidden;
///       template <class Visitor> void visit_tensors(Visitor&& visit) { visit(logits), visit(hidden); }
///     };
///
///     template <class Visitor> void visit_tensors(Output& output, Visitor&& visit);
///
/// the latter in Output's namespace.
namespace torch::nn::utils::rnn {
class PackedSequence;
}
namespace c10 {
struct IValue;
}

namespace lockstep {
namespace internal {

/// What a type is to the search.
enum class Holds {
  kNothing,
  kTensor,
  kOwnVisit,  // visit_tensors() says it
  kIValue,
  kPackedSequence,
  kPointer,  // raw, std::unique_ptr, std::shared_ptr, c10::intrusive_ptr
  kReference,
  kOptional,
  kVariant,
  kMap,
  kOrderedDict,
  kList,  // c10::List: copies share the elements
  kDict,  // c10::Dict: the same
  kView,  // a range of elements that it does not own: at::ArrayRef, std::span
  kRange,
  kTuple,
  kUnknown,
};

/// Stands for a visitor where only the existence of a function is asked.
struct ProbeVisitor {
  template <class Part>
  void operator()(Part&&) const {}
};

template <class T>
concept VisitsItself = requires(T& value, const ProbeVisitor& visit) {
  value.visit_tensors(visit);
};
template <class T>
concept IsVisited = requires(T& value, const ProbeVisitor& visit) {
  visit_tensors(value, visit);
};
template <class T>
concept PointerLike = (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) ||
                      requires(const T& pointer) {
  typename T::element_type;
  *pointer;
  static_cast<bool>(pointer);
};
template <class T>
concept OptionalLike = requires(T& value) {
  typename T::value_type;
  { value.has_value() } -> std::same_as<bool>;
  *value;
};
template <class T>
concept SharedDict = requires(const T& dict) {
  typename T::mapped_type;
  { dict.copy() } -> std::same_as<T>;
};
template <class T>
concept SharedList = requires(const T& list, size_t i) {
  typename T::value_type;
  { list.copy() } -> std::same_as<T>;
  list.get(i);
};
template <class T>
concept Range =
    std::ranges::input_range<T&> && !std::is_same_v<std::remove_cv_t<std::ranges::range_value_t<T&>>, T>;
template <class T>
concept MapLike = Range<T> && requires {
  typename T::mapped_type;
};
template <class T>
concept OrderedDictLike = Range<T> && requires(std::ranges::range_reference_t<T&> item) {
  item.key();
  item.value();
};

template <class T>
inline constexpr bool kIsReferenceWrapper = false;
template <class T>
inline constexpr bool kIsReferenceWrapper<std::reference_wrapper<T>> = true;
template <class T>
inline constexpr bool kIsVariant = false;
template <class... T>
inline constexpr bool kIsVariant<std::variant<T...>> = true;
template <class T>
inline constexpr bool kIsArray = false;
template <class T, size_t kSize>
inline constexpr bool kIsArray<std::array<T, kSize>> = true;
template <class T>
inline constexpr bool kIsTuple = false;
template <class... T>
inline constexpr bool kIsTuple<std::tuple<T...>> = true;
template <class First, class Second>
inline constexpr bool kIsTuple<std::pair<First, Second>> = true;

template <class T>
consteval Holds what_holds() {
  if constexpr (std::is_void_v<T> || std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                std::is_null_pointer_v<T>) {
    return Holds::kNothing;
  } else if constexpr (std::is_pointer_v<T> && std::is_void_v<std::remove_pointer_t<T>>) {
    return Holds::kUnknown;  // it may point to anything
  } else if constexpr (PointerLike<T>) {
    return Holds::kPointer;
  } else if constexpr (!requires { sizeof(T); }) {
    return Holds::kUnknown;  // only declared, so far
  } else if constexpr (std::is_base_of_v<at::Tensor, T>) {
    return Holds::kTensor;
  } else if constexpr (VisitsItself<T> || IsVisited<T>) {
    return Holds::kOwnVisit;
  } else if constexpr (std::is_same_v<T, torch::nn::utils::rnn::PackedSequence>) {
    return Holds::kPackedSequence;
  } else if constexpr (kIsReferenceWrapper<T>) {
    return Holds::kReference;
  } else if constexpr (std::is_same_v<T, c10::Scalar> || std::is_same_v<T, at::Generator>) {
    return Holds::kNothing;
  } else if constexpr (OptionalLike<T>) {
    return Holds::kOptional;
  } else if constexpr (kIsVariant<T>) {
    return Holds::kVariant;
  } else if constexpr (SharedDict<T>) {
    return Holds::kDict;
  } else if constexpr (SharedList<T>) {
    return Holds::kList;
  } else if constexpr (MapLike<T>) {
    return Holds::kMap;
  } else if constexpr (OrderedDictLike<T>) {
    return Holds::kOrderedDict;
  } else if constexpr (Range<T>) {
    return std::is_trivially_copyable_v<T> && !kIsArray<T> ? Holds::kView : Holds::kRange;
  } else if constexpr (kIsTuple<T>) {
    return Holds::kTuple;
  } else if constexpr (std::is_trivially_copyable_v<T>) {
    return Holds::kNothing;
  } else {
    return Holds::kUnknown;
  }
}
// Complete or not: it is searched out of line.
template <>
consteval Holds what_holds<c10::IValue>() {
  return Holds::kIValue;
}

consteval bool has_parts(Holds what) {
  return what != Holds::kNothing && what != Holds::kUnknown && what != Holds::kTensor &&
         what != Holds::kOwnVisit && what != Holds::kIValue && what != Holds::kPackedSequence;
}

/// Whether the part refers to tensors that lie elsewhere, which a copy of the value shares.
consteval bool is_elsewhere(Holds what) {
  return what == Holds::kPointer || what == Holds::kReference || what == Holds::kView;
}

/// Whether a T consists of nothing but what the test accepts; it is asked about parts without parts. Unless
/// `kThrough`, not about what lies elsewhere, but no known tensor may be there.
using LeafTest = bool (*)(Holds);
template <class T, bool kThrough = true>
consteval bool all_leaves(LeafTest accepts);

template <class T>
consteval bool holds_none() {
  return all_leaves<T>([](Holds what) { return what == Holds::kNothing; });
}
/// Whether no part of T is known to hold a tensor.
template <class T>
consteval bool shows_none() {
  return all_leaves<T>([](Holds what) { return what == Holds::kNothing || what == Holds::kUnknown; });
}

template <bool kThrough, template <class...> class Pack, class... T>
consteval bool all_leaves_of_pack(std::type_identity<Pack<T...>> /*type*/, LeafTest accepts) {
  return (all_leaves<std::remove_cvref_t<T>, kThrough>(accepts) && ...);
}

template <class T, bool kThrough>
consteval bool all_leaves(LeafTest accepts) {
  constexpr Holds kWhat = what_holds<T>();
  if constexpr (!has_parts(kWhat)) {
    return accepts(kWhat);
  } else if constexpr (!kThrough && is_elsewhere(kWhat)) {
    return shows_none<T>();
  } else if constexpr (kWhat == Holds::kPointer) {
    return all_leaves<std::remove_cvref_t<decltype(*std::declval<const T&>())>, kThrough>(accepts);
  } else if constexpr (kWhat == Holds::kReference) {
    return all_leaves<std::remove_cv_t<typename T::type>, kThrough>(accepts);
  } else if constexpr (kWhat == Holds::kOptional || kWhat == Holds::kList) {
    return all_leaves<std::remove_cv_t<typename T::value_type>, kThrough>(accepts);
  } else if constexpr (kWhat == Holds::kDict || kWhat == Holds::kMap) {
    return all_leaves<std::remove_cv_t<typename T::mapped_type>, kThrough>(accepts);
  } else if constexpr (kWhat == Holds::kOrderedDict) {
    using Value = decltype(std::declval<std::ranges::range_reference_t<T&>>().value());
    return all_leaves<std::remove_cvref_t<Value>, kThrough>(accepts);
  } else if constexpr (kWhat == Holds::kRange || kWhat == Holds::kView) {
    return all_leaves<std::remove_cv_t<std::ranges::range_value_t<T&>>, kThrough>(accepts);
  } else {
    return all_leaves_of_pack<kThrough>(std::type_identity<T>(), accepts);
  }
}

/// The search in an IValue; the first form puts a new container in the place of each one that holds tensors,
/// so that others who share the old one see no change. Objects of TorchScript classes are looked into, and
/// changed in place, only if `through_objects`.
void walk_ivalue(c10::IValue& value, bool through_objects, c10::function_ref<void(at::Tensor&)> visit);
void walk_ivalue(const c10::IValue& value, bool through_objects,
                 c10::function_ref<void(const at::Tensor&)> visit);

/// What a tuple, list or dict in an IValue consists of: elements, or values in the order of the dict. None of
/// other IValues.
std::vector<c10::IValue> parts_of(const c10::IValue& value);
/// A tuple, list or dict such as `value`, with these parts; as many as it has.
c10::IValue with_parts(const c10::IValue& value, std::vector<c10::IValue> parts);

/// Calls `visit` for each part that `value` has itself, of an IValue or a packed sequence for each tensor;
/// for what lies elsewhere only if kThrough.
template <bool kThrough, class T, class Visit>
void for_each_part(T& value, const Visit& visit) {
  using Plain = std::remove_const_t<T>;
  constexpr Holds kWhat = what_holds<Plain>();
  if constexpr (!kThrough && is_elsewhere(kWhat)) {
    return;
  } else if constexpr (kWhat == Holds::kOwnVisit) {
    const auto part = [&visit](auto&& inner) { visit(inner); };
    const auto const_part = [&visit](auto&& inner) { visit(std::as_const(inner)); };
    if constexpr (VisitsItself<T>) {
      value.visit_tensors(part);
    } else if constexpr (IsVisited<T>) {
      visit_tensors(value, part);
    } else if constexpr (VisitsItself<Plain>) {  // const, and its visit_tensors() is not; it is not changed
      const_cast<Plain&>(value).visit_tensors(const_part);
    } else {
      visit_tensors(const_cast<Plain&>(value), const_part);
    }
  } else if constexpr (kWhat == Holds::kIValue) {
    using Tensor = std::conditional_t<std::is_const_v<T>, const at::Tensor, at::Tensor>;
    walk_ivalue(value, kThrough, [&visit](Tensor& tensor) { visit(tensor); });
  } else if constexpr (kWhat == Holds::kPackedSequence) {
    at::Tensor parts[] = {value.data(), value.batch_sizes(), value.sorted_indices(),
                          value.unsorted_indices()};
    for (auto& part : parts) visit(part);
    if constexpr (!std::is_const_v<T>) value = T(parts[0], parts[1], parts[2], parts[3]);
  } else if constexpr (kWhat == Holds::kPointer) {
    if (value) visit(*value);
  } else if constexpr (kWhat == Holds::kReference) {
    visit(value.get());
  } else if constexpr (kWhat == Holds::kOptional) {
    if (value.has_value()) visit(*value);
  } else if constexpr (kWhat == Holds::kVariant) {
    std::visit([&visit](auto& inner) { visit(inner); }, value);
  } else if constexpr (kWhat == Holds::kMap) {
    for (auto& item : value) visit(item.second);
  } else if constexpr (kWhat == Holds::kOrderedDict) {
    for (auto& item : value) visit(item.value());
  } else if constexpr (kWhat == Holds::kList) {
    if constexpr (std::is_const_v<T>) {
      for (size_t i = 0; i < value.size(); ++i) {
        const typename Plain::value_type element = value.get(i);
        visit(element);
      }
    } else {
      value = value.copy();
      for (size_t i = 0; i < value.size(); ++i) {
        typename T::value_type element = value.get(i);
        visit(element);
        value.set(i, std::move(element));
      }
    }
  } else if constexpr (kWhat == Holds::kDict) {
    if constexpr (std::is_const_v<T>) {
      for (const auto& item : value) {
        const typename Plain::mapped_type element = item.value();
        visit(element);
      }
    } else {
      value = value.copy();
      for (const auto& item : value) {
        typename T::mapped_type element = item.value();
        visit(element);
        item.setValue(std::move(element));
      }
    }
  } else if constexpr (kWhat == Holds::kView || kWhat == Holds::kRange) {
    for (auto&& element : value) visit(element);
  } else if constexpr (kWhat == Holds::kTuple) {
    std::apply([&visit](auto&... element) { (visit(element), ...); }, value);
  } else {
    static_assert(!has_parts(kWhat));
  }
}

/// Calls `visit` for each tensor in `value`; for what lies elsewhere only if kThrough.
template <bool kThrough, class T, class Visit>
void walk(T& value, Visit& visit) {
  if constexpr (holds_none<std::remove_const_t<T>>()) {
    return;
  } else if constexpr (what_holds<std::remove_const_t<T>>() != Holds::kTensor) {
    for_each_part<kThrough>(value, [&visit](auto& part) { walk<kThrough>(part, visit); });
  } else if (value.defined()) {
    if constexpr (std::is_invocable_v<Visit&, T&>) {
      visit(value);
    } else {
      at::Tensor handle = value;  // of a const tensor: what the visitor puts there has no place
      visit(handle);
    }
  }
}

}  // namespace internal

/// Whether all tensors of a T can be found. Not so where T has a part that is neither listed above, nor
/// trivially copyable, nor has a visit_tensors(): a class, std::any, a pointer to void.
template <class T>
inline constexpr bool can_find_tensors = internal::all_leaves<std::remove_cvref_t<T>>(
    [](internal::Holds what) { return what != internal::Holds::kUnknown; });

/// Whether for_each_owned_tensor() finds all tensors of a T, as far as is known of what lies behind pointers,
/// and others can take their place. Not so for packed sequences, whose tensors belong together.
template <class T>
inline constexpr bool can_replace_tensors =
    internal::all_leaves<std::remove_cvref_t<T>, false>([](internal::Holds what) {
      return what != internal::Holds::kUnknown && what != internal::Holds::kPackedSequence;
    });

/// Calls f for each defined tensor in `value`, in order, as often as it stands there; what can_find_tensors
/// has no answer for is passed over. f gets `at::Tensor&` and may put another tensor there; in const values,
/// and in the const parts of others, `const at::Tensor&` (or a handle, if it wants none but `at::Tensor&`).
/// A value that was passed as non-const gets c10::Lists, Dicts and IValues of its own; what lies behind
/// pointers is changed where it is.
template <class T, class F>
void for_each_tensor(T&& value, F&& f) {
  internal::walk<true>(value, f);
}

/// The same without what lies behind pointers, references and views, or in objects of TorchScript classes:
/// the tensors that a copy of the value has for itself.
template <class T, class F>
void for_each_owned_tensor(T&& value, F&& f) {
  internal::walk<false>(value, f);
}

}  // namespace lockstep

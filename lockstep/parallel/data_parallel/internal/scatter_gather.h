#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <lockstep/base/tensor_tree.h>

/// Splits arguments over replicas, and puts their outputs together: torch/nn/parallel/scatter_gather.py, by
/// types.
namespace lockstep::data_parallel::internal {

using lockstep::internal::Holds;

/// The chunks of each tensor, one per replica.
struct Scattered {
  int replicas = 0;
  std::vector<std::vector<at::Tensor>> chunks;
};

/// Splits each tensor along `dim` as torch::chunk does, so there may be fewer chunks than devices, the last
/// of them smaller; an empty tensor makes one chunk. Chunk i lies on device i. No tensors: as many replicas
/// as devices. Throws c10::ValueError for tensors without dimensions, and if tensors make different numbers
/// of chunks (torch drops the rest without a word).
Scattered scatter(const std::vector<at::Tensor>& tensors, const std::vector<at::Device>& devices,
                  int64_t dim);

/// Where gathered tensors go, and how.
struct GatherPlace {
  at::Device device;
  int64_t dim;
};

/// The replicas' tensors in one, along `dim`; scalars become a vector when dim is 0.
at::Tensor gather_tensors(std::vector<at::Tensor> tensors, const GatherPlace& place);
/// The same for IValues of one nest.
c10::IValue gather_ivalues(const std::vector<const c10::IValue*>& values, const GatherPlace& place);
/// "replica 2 returned a list of 3 elements where replica 0 returned 4"
[[noreturn]] void throw_different(size_t replica, const std::string& its, const std::string& first);

/// An argument of type A as a replica gets it: its own copy if there are tensors in it, else the caller's.
template <class A>
using ReplicaArgument = std::conditional_t<lockstep::internal::shows_none<std::remove_cvref_t<A>>(),
                                           std::remove_reference_t<A>&, std::remove_cvref_t<A>>;

template <class A, class Next>
ReplicaArgument<A> argument_for_replica(std::remove_reference_t<A>& argument, Next& next) {
  if constexpr (std::is_reference_v<ReplicaArgument<A>>) {
    return argument;
  } else {
    static_assert(
        (lockstep::internal::all_leaves<std::remove_cvref_t<A>, false>(
            [](Holds what) { return what != Holds::kPackedSequence; })),
        "DataParallel can't scatter tensors behind pointers, references or views such as "
        "at::TensorList, nor packed sequences: pass tensors, or a std::vector, tuple or map of them");
    ReplicaArgument<A> copy = argument;
    for_each_owned_tensor(copy, [&next](at::Tensor& tensor) { tensor = *next++; });
    return copy;
  }
}

/// The argument as the caller passed it; but as an lvalue if all replicas get the same object.
template <class A, class Copy>
decltype(auto) pass_on(Copy& copy) {
  if constexpr (std::is_reference_v<ReplicaArgument<A>>) {
    return static_cast<Copy&>(copy);
  } else {
    return static_cast<A&&>(copy);
  }
}

template <class T>
T gather_all(std::vector<T>& outputs, const GatherPlace& place);

/// Puts what all `parts` (one per replica) hold together in parts[0].
template <class T>
void gather_parts(const std::vector<T*>& parts, const GatherPlace& place) {
  constexpr Holds kWhat = lockstep::internal::what_holds<T>();
  T& first = *parts[0];
  const auto check_size = [&](auto&& size_of, const char* what) {
    for (size_t i = 1; i < parts.size(); ++i) {
      if (size_of(*parts[i]) == size_of(first)) continue;
      throw_different(i, what + std::to_string(size_of(*parts[i])), what + std::to_string(size_of(first)));
    }
  };
  // Gathers the part that get(value) leads to.
  const auto gather_part = [&]<class Get>(const Get& get) {
    std::vector<std::remove_reference_t<decltype(get(first))>*> inner;
    for (T* part : parts) inner.push_back(&get(*part));
    gather_parts(inner, place);
  };
  if constexpr (kWhat == Holds::kTensor) {
    std::vector<at::Tensor> tensors;
    for (T* part : parts) tensors.push_back(*part);
    first = gather_tensors(std::move(tensors), place);
  } else if constexpr (kWhat == Holds::kIValue) {
    first = gather_ivalues({parts.begin(), parts.end()}, place);
  } else if constexpr (lockstep::internal::holds_none<T>()) {
    if constexpr (std::equality_comparable<T>) {
      for (size_t i = 1; i < parts.size(); ++i) {
        TORCH_CHECK(*parts[i] == first, "replica ", i,
                    " returned another value than replica 0 for a part of the output that is not a tensor; ",
                    "return it as a tensor to have that of each replica");
      }
    }
  } else if constexpr (kWhat == Holds::kOwnVisit) {
    std::vector<std::vector<at::Tensor>> tensors(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      for_each_owned_tensor(*parts[i], [&](at::Tensor& tensor) { tensors[i].push_back(tensor); });
      if (tensors[i].size() == tensors[0].size()) continue;
      throw_different(i, std::to_string(tensors[i].size()) + " tensors", std::to_string(tensors[0].size()));
    }
    size_t next = 0;
    for_each_owned_tensor(first, [&](at::Tensor& tensor) {
      std::vector<at::Tensor> same;
      for (const auto& of_replica : tensors) same.push_back(of_replica[next]);
      tensor = gather_tensors(std::move(same), place);
      ++next;
    });
  } else if constexpr (kWhat == Holds::kOptional) {
    check_size([](const T& value) { return static_cast<int>(value.has_value()); }, "an optional with size ");
    if (first.has_value()) gather_part([](T & value) -> auto& { return *value; });
  } else if constexpr (kWhat == Holds::kVariant) {
    check_size([](const T& value) { return value.index(); }, "a variant's alternative ");
    std::visit(
        [&](auto& alternative) {
          using Alternative = std::remove_reference_t<decltype(alternative)>;
          std::vector<Alternative*> inner;
          for (T* part : parts) inner.push_back(std::get_if<Alternative>(part));
          gather_parts(inner, place);
        },
        first);
  } else if constexpr (kWhat == Holds::kTuple) {
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      (gather_part([](T & value) -> auto& { return std::get<kIndex>(value); }), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (kWhat == Holds::kMap) {
    check_size([](const T& value) { return value.size(); }, "a map of size ");
    for (auto& item : first) {
      gather_part([&](T & value) -> auto& {
        const auto found = value.find(item.first);
        TORCH_CHECK(found != value.end(), "a replica returned a map without a key that replica 0's has");
        return found->second;
      });
    }
  } else if constexpr (kWhat == Holds::kOrderedDict) {
    check_size([](const T& value) { return value.size(); }, "an OrderedDict of size ");
    for (auto& item : first) gather_part([&](T & value) -> auto& { return value[item.key()]; });
  } else if constexpr (kWhat == Holds::kList) {
    check_size([](const T& value) { return value.size(); }, "a List of size ");
    first = first.copy();
    for (size_t k = 0; k < first.size(); ++k) {
      std::vector<typename T::value_type> elements;
      for (T* part : parts) elements.push_back(part->get(k));
      first.set(k, gather_all(elements, place));
    }
  } else if constexpr (kWhat == Holds::kDict) {
    check_size([](const T& value) { return value.size(); }, "a Dict of size ");
    first = first.copy();
    for (const auto& item : first) {
      std::vector<typename T::mapped_type> elements;
      for (T* part : parts) elements.push_back(part->at(item.key()));
      item.setValue(gather_all(elements, place));
    }
  } else {
    static_assert(kWhat == Holds::kRange,
                  "DataParallel can't gather this output: it has a part that is a pointer, a view, a packed "
                  "sequence, or a class without visit_tensors() (lockstep/base/tensor_tree.h)");
    check_size([](const T& value) { return std::distance(value.begin(), value.end()); }, "a list of size ");
    for (std::ptrdiff_t k = 0; k < std::distance(first.begin(), first.end()); ++k) {
      gather_part([&](T & value) -> auto& { return *std::next(value.begin(), k); });
    }
  }
}

/// The replicas' outputs in one.
template <class T>
T gather_all(std::vector<T>& outputs, const GatherPlace& place) {
  std::vector<T*> parts;
  for (auto& output : outputs) parts.push_back(&output);
  gather_parts(parts, place);
  return std::move(outputs[0]);
}

}  // namespace lockstep::data_parallel::internal

#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

/// How the default collate function makes a batch of samples of type T; specialise it for types of your own:
///
///     template <>
///     struct lockstep::data::Collate<Document> {
///       static Batch collate(const std::vector<Document>& samples);
///     };
template <class T>
struct Collate;

template <class T>
concept Collatable = requires(const std::vector<T>& samples) {
  Collate<T>::collate(samples);
};

template <Collatable T>
using Collated = std::decay_t<decltype(Collate<T>::collate(std::declval<const std::vector<T>&>()))>;

/// default_collate of torch/utils/data/_utils/collate.py, for C++'s types:
///
/// | a sample                          | the batch                                                       |
/// |-----------------------------------|-----------------------------------------------------------------|
/// | at::Tensor                        | stacked along a new first dimension                             |
/// | Example                           | Example of both, stacked                                        |
/// | integer, bool, double, float      | a tensor: int64, bool, float64 (as Python's float), float32     |
/// | std::string                       | std::vector<std::string>                                        |
/// | pair, tuple, array                | the same of batches                                             |
/// | vector                            | a vector of batches, one for each place; all equally long       |
/// | map, unordered_map                | the same with batches; the first sample's keys                  |
///
/// Throws c10::Error when shapes, lengths or keys differ.
struct DefaultCollate {
  template <Collatable T>
  Collated<T> operator()(const std::vector<T>& samples) const {
    TORCH_CHECK_VALUE(!samples.empty(), "default_collate: there are no samples to make a batch of");
    return Collate<T>::collate(samples);
  }
};

namespace internal {

/// A batch of one part of each sample.
template <class T, class Sample, class Part>
Collated<T> collate_part(const std::vector<Sample>& samples, const Part& part) {
  std::vector<T> parts;
  parts.reserve(samples.size());
  for (const Sample& sample : samples) parts.push_back(part(sample));
  return Collate<T>::collate(parts);
}

template <class Map>
struct CollateMap {
  using Value = typename Map::mapped_type;
  static auto collate(const std::vector<Map>& samples) {
    std::map<typename Map::key_type, Collated<Value>> batch;
    for (const auto& [key, unused] : samples.front()) {
      batch.emplace(key, collate_part<Value>(samples, [&key = key](const Map& sample) {
                      const auto found = sample.find(key);
                      TORCH_CHECK_VALUE(found != sample.end(),
                                        "each sample of a batch should have the same "
                                        "keys; one has none that the first has");
                      return found->second;
                    }));
    }
    return batch;
  }
};

}  // namespace internal

template <>
struct Collate<at::Tensor> {
  static at::Tensor collate(const std::vector<at::Tensor>& samples) { return at::stack(samples); }
};

template <>
struct Collate<Example> {
  static Example collate(const std::vector<Example>& samples) {
    return {internal::collate_part<at::Tensor>(samples, [](const Example& sample) { return sample.data; }),
            internal::collate_part<at::Tensor>(samples, [](const Example& sample) { return sample.target; })};
  }
};

template <class T>
requires std::integral<T> || std::floating_point<T>
struct Collate<T> {
  using Element = std::conditional_t<std::integral<T> && !std::same_as<T, bool>, int64_t, T>;
  static at::Tensor collate(const std::vector<T>& samples) {
    const auto batch = at::empty({static_cast<int64_t>(samples.size())},
                                 at::TensorOptions().dtype(c10::CppTypeToScalarType<Element>::value));
    auto* out = batch.template mutable_data_ptr<Element>();
    for (const T sample : samples) *out++ = static_cast<Element>(sample);
    return batch;
  }
};

template <>
struct Collate<std::string> {
  static std::vector<std::string> collate(const std::vector<std::string>& samples) { return samples; }
};

template <Collatable A, Collatable B>
struct Collate<std::pair<A, B>> {
  static std::pair<Collated<A>, Collated<B>> collate(const std::vector<std::pair<A, B>>& samples) {
    return {internal::collate_part<A>(samples, [](const auto& sample) { return sample.first; }),
            internal::collate_part<B>(samples, [](const auto& sample) { return sample.second; })};
  }
};

template <Collatable... Ts>
struct Collate<std::tuple<Ts...>> {
  static std::tuple<Collated<Ts>...> collate(const std::vector<std::tuple<Ts...>>& samples) {
    return [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
      return std::tuple<Collated<Ts>...>{internal::collate_part<Ts>(
          samples, [](const auto& sample) { return std::get<kPlaces>(sample); })...};
    }
    (std::index_sequence_for<Ts...>());
  }
};

template <Collatable T, size_t kSize>
struct Collate<std::array<T, kSize>> {
  static std::array<Collated<T>, kSize> collate(const std::vector<std::array<T, kSize>>& samples) {
    std::array<Collated<T>, kSize> batch;
    for (size_t i = 0; i < kSize; ++i) {
      batch[i] = internal::collate_part<T>(samples, [i](const auto& sample) { return sample[i]; });
    }
    return batch;
  }
};

template <Collatable T>
struct Collate<std::vector<T>> {
  static std::vector<Collated<T>> collate(const std::vector<std::vector<T>>& samples) {
    const size_t size = samples.front().size();
    for (const auto& sample : samples) {
      TORCH_CHECK_VALUE(sample.size() == size,
                        "each element in list of batch should be of equal size, but one "
                        "has ",
                        sample.size(), " and the first ", size);
    }
    std::vector<Collated<T>> batch;
    batch.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      batch.push_back(internal::collate_part<T>(samples, [i](const auto& sample) -> T { return sample[i]; }));
    }
    return batch;
  }
};

template <class K, Collatable V, class... Rest>
struct Collate<std::map<K, V, Rest...>> : internal::CollateMap<std::map<K, V, Rest...>> {};
template <class K, Collatable V, class... Rest>
struct Collate<std::unordered_map<K, V, Rest...>> : internal::CollateMap<std::unordered_map<K, V, Rest...>> {
};

}  // namespace lockstep::data

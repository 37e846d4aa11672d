#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>

#include <lockstep/data/internal/dataset_handle.h>

namespace lockstep::data {

namespace internal {

/// `indices` through `subset`; throws c10::IndexError for one outside of it.
std::vector<int64_t> look_up(const std::vector<int64_t>& subset, std::span<const int64_t> indices);
/// Python's lengths for fractions, with Python's errors.
std::vector<int64_t> lengths_of(const std::vector<double>& fractions, int64_t size);
/// The indices of each part.
std::vector<std::vector<int64_t>> split(const std::vector<int64_t>& lengths, int64_t size,
                                        const std::optional<at::Generator>& generator);

}  // namespace internal

/// The samples of a map-style data set at given indices. Subset of torch/utils/data/dataset.py. A data set
/// given as an lvalue is referred to and must outlive the subset and its copies; a temporary is moved in and
/// shared by the copies. As thread-safe as the data set.
template <class Dataset>
class Subset {
 public:
  Subset(const Dataset& dataset, std::vector<int64_t> indices)
      : Subset(internal::hold(dataset), std::move(indices)) {}
  Subset(Dataset&& dataset, std::vector<int64_t> indices)
      : Subset(internal::hold(std::move(dataset)), std::move(indices)) {}
  Subset(std::shared_ptr<const Dataset> dataset, std::vector<int64_t> indices)
      : dataset_(std::move(dataset)),
        indices_(std::make_shared<const std::vector<int64_t>>(std::move(indices))) {}

  int64_t size() const { return static_cast<int64_t>(indices_->size()); }
  auto get(int64_t index) const requires(requires(const Dataset& dataset, int64_t i) { dataset.get(i); }) {
    return dataset_->get(internal::look_up(*indices_, std::span(&index, 1))[0]);
  }
  auto get_batch(std::span<const int64_t> indices) const
      requires(requires(const Dataset& dataset) { dataset.get_batch(indices); }) {
    return dataset_->get_batch(internal::look_up(*indices_, indices));
  }

  const Dataset& dataset() const { return *dataset_; }
  const std::vector<int64_t>& indices() const { return *indices_; }

 private:
  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<const std::vector<int64_t>> indices_;
};

/// Splits a data set at random into parts of these lengths, or fractions (floating point) of it: Python's
/// split for the same generator state. random_split of torch/utils/data/dataset.py.
///
///     auto parts = random_split(train, {50000, 10000});
///     auto parts = random_split(train, {0.8, 0.2}, generator);
///
/// A fraction gives floor(fraction × size) samples, and what is left over goes one by one to the first parts.
/// Without a generator the default one decides. A temporary data set is shared by the parts. Throws
/// c10::ValueError when lengths don't add up to the data set's size or fractions to 1, and for a fraction
/// outside [0, 1]; warns of a fraction that gives no samples. Lengths whose sum is 1 are taken for fractions,
/// as in Python.
template <class Dataset, class Number>
auto random_split(Dataset&& dataset, const std::vector<Number>& lengths,
                  const std::optional<at::Generator>& generator = std::nullopt) {
  const auto shared = internal::hold(std::forward<Dataset>(dataset));
  const auto size = static_cast<int64_t>(shared->size());
  const bool fractions =
      std::is_floating_point_v<Number> || std::accumulate(lengths.begin(), lengths.end(), Number{0}) == 1;
  const auto counts = fractions ? internal::lengths_of({lengths.begin(), lengths.end()}, size)
                                : std::vector<int64_t>(lengths.begin(), lengths.end());
  std::vector<Subset<std::decay_t<Dataset>>> parts;
  for (auto& indices : internal::split(counts, size, generator)) {
    parts.emplace_back(shared, std::move(indices));
  }
  return parts;
}
template <class Dataset, class Number>
auto random_split(Dataset&& dataset, std::initializer_list<Number> lengths,
                  const std::optional<at::Generator>& generator = std::nullopt) {
  return random_split(std::forward<Dataset>(dataset), std::vector<Number>(lengths), generator);
}

}  // namespace lockstep::data

#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/data/internal/dataset_handle.h>

namespace lockstep::data {

namespace internal {

/// Which part an index lies in, and where there.
struct PartPlace {
  size_t part = 0;
  int64_t index = 0;
};
/// `ends`: Python's cumulative_sizes. Throws c10::IndexError for an index outside [0, ends.back()).
PartPlace find_part(const std::vector<int64_t>& ends, int64_t index);
/// Cumulative sums. Throws c10::ValueError when there are no parts.
std::vector<int64_t> ends_of(const std::vector<int64_t>& sizes);

}  // namespace internal

/// Map-style data sets one after the other, of any types with the same type of sample. ConcatDataset of
/// torch/utils/data/dataset.py.
///
///     ConcatDataset both(flowers, birds);                     // referred to: they must outlive it
///     ConcatDataset all(std::vector<CsvDataset>{…});          // moved in
///
/// The sizes are asked for once, when it is made. As thread-safe as the data sets.
template <class Sample>
class ConcatDataset {
 public:
  template <class First, class... Rest>
  requires requires(const First& first) {
    { first.get(int64_t{}) } -> std::convertible_to<Sample>;
  }
  explicit ConcatDataset(First&& first, Rest&&... rest) {
    std::vector<int64_t> sizes;
    add(sizes, internal::hold(std::forward<First>(first)));
    (add(sizes, internal::hold(std::forward<Rest>(rest))), ...);
    ends_ = internal::ends_of(sizes);
  }
  template <class Dataset>
  explicit ConcatDataset(std::vector<Dataset> datasets) {
    std::vector<int64_t> sizes;
    for (Dataset& dataset : datasets) add(sizes, internal::hold(std::move(dataset)));
    ends_ = internal::ends_of(sizes);
  }

  int64_t size() const { return ends_.back(); }
  Sample get(int64_t index) const {
    const auto [part, place] = internal::find_part(ends_, index);
    return parts_[part](place);
  }

  /// Where each data set ends.
  const std::vector<int64_t>& cumulative_sizes() const { return ends_; }

 private:
  template <class Dataset>
  void add(std::vector<int64_t>& sizes, std::shared_ptr<const Dataset> dataset) {
    sizes.push_back(static_cast<int64_t>(dataset->size()));
    parts_.push_back([dataset = std::move(dataset)](int64_t index) -> Sample { return dataset->get(index); });
  }

  std::vector<std::function<Sample(int64_t)>> parts_;
  std::vector<int64_t> ends_;
};
template <class First, class... Rest>
ConcatDataset(First&&, Rest&&...)
    -> ConcatDataset<std::decay_t<decltype(std::declval<const First&>().get(int64_t{}))>>;
template <class Dataset>
ConcatDataset(std::vector<Dataset>)
    -> ConcatDataset<std::decay_t<decltype(std::declval<const Dataset&>().get(int64_t{}))>>;

}  // namespace lockstep::data

#include <cmath>
#include <numeric>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/subset.h>
#include <lockstep/data/internal/random.h>

namespace lockstep::data::internal {

std::vector<int64_t> look_up(const std::vector<int64_t>& subset, std::span<const int64_t> indices) {
  std::vector<int64_t> answer;
  answer.reserve(indices.size());
  for (const int64_t index : indices) {
    TORCH_CHECK_INDEX(index >= 0 && static_cast<size_t>(index) < subset.size(), "index ", index,
                      " is out of range for a Subset with ", subset.size(), " samples");
    answer.push_back(subset[static_cast<size_t>(index)]);
  }
  return answer;
}

std::vector<int64_t> lengths_of(const std::vector<double>& fractions, int64_t size) {
  const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  constexpr double kTolerance = 1e-9;  // math.isclose's
  TORCH_CHECK_VALUE(sum <= 1 && 1 - sum <= kTolerance, "random_split: the fractions add up to ", sum,
                    "; they should add up to 1");
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < fractions.size(); ++i) {
    TORCH_CHECK_VALUE(fractions[i] >= 0 && fractions[i] <= 1, "Fraction at index ", i,
                      " is not between 0 and 1");
    lengths.push_back(static_cast<int64_t>(std::floor(static_cast<double>(size) * fractions[i])));
  }
  const int64_t left = size - std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  for (int64_t i = 0; i < left; ++i) ++lengths[static_cast<size_t>(i) % lengths.size()];
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] == 0) {
      TORCH_WARN("Length of split at index ", i, " is 0. This might result in an empty dataset.");
    }
  }
  return lengths;
}

std::vector<std::vector<int64_t>> split(const std::vector<int64_t>& lengths, int64_t size,
                                        const std::optional<at::Generator>& generator) {
  for (const int64_t length : lengths) {
    TORCH_CHECK_VALUE(length >= 0, "random_split: a length is ", length, "; lengths are 0 or more");
  }
  const int64_t sum = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  TORCH_CHECK_VALUE(sum == size, "Sum of input lengths does not equal the length of the input dataset! (",
                    sum, " and ", size, ")");
  const auto order = random_permutation(size, generator);
  std::vector<std::vector<int64_t>> parts;
  auto first = order.begin();
  for (const int64_t length : lengths) {
    parts.emplace_back(first, first + length);
    first += length;
  }
  return parts;
}

}  // namespace lockstep::data::internal

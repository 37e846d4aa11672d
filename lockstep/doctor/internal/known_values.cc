#include <sstream>

#include <lockstep/doctor/internal/known_values.h>

namespace lockstep::doctor::internal {

void fill_contribution(const at::Tensor& tensor, int rank) {
  auto* data = tensor.data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) data[i] = contribution(rank, i);
}

std::string difference_from_sum(const at::Tensor& tensor, const std::vector<int>& ranks) {
  // Every contribution is a factor of the rank times a factor of the element.
  float factor = 0;
  for (int rank : ranks) factor += contribution(rank, 0);
  const auto* data = tensor.const_data_ptr<float>();
  int64_t wrong = 0;
  std::ostringstream text;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const float expected = factor * contribution(0, i);
    if (data[i] == expected) continue;
    if (wrong++ == 0) text << "element " << i << " is " << data[i] << " instead of " << expected;
  }
  if (wrong == 0) return "";
  text << " (" << wrong << " of " << tensor.numel() << " are wrong)";
  return text.str();
}

}  // namespace lockstep::doctor::internal

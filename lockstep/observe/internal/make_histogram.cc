#include <algorithm>
#include <cmath>
#include <variant>

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histogram.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <lockstep/observe/internal/make_histogram.h>

namespace lockstep::observe::internal {
namespace {

/// SummaryWriter.default_bins, by the same additions and multiplications.
const std::vector<double>& tensorflow_edges() {
  static const std::vector<double> all = [] {
    std::vector<double> positive;
    for (double v = 1e-12; v < 1e20; v *= 1.1) positive.push_back(v);
    std::vector<double> edges;
    std::transform(positive.rbegin(), positive.rend(), std::back_inserter(edges),
                   [](double v) { return -v; });
    edges.push_back(0);
    edges.insert(edges.end(), positive.begin(), positive.end());
    return edges;
  }();
  return all;
}

struct Counts {
  std::vector<double> counts;  // of the bins
  std::vector<double> edges;   // one more
};

Counts count(const at::Tensor& values, const std::vector<double>& edges) {
  TORCH_CHECK_VALUE(edges.size() >= 2 && std::is_sorted(edges.begin(), edges.end()),
                    "add_histogram: `bins` must be at least two edges that increase monotonically; got ",
                    edges.size(), " edges");
  // `histogram` does not write to them.
  const at::Tensor tensor =
      at::from_blob(const_cast<double*>(edges.data()), {static_cast<int64_t>(edges.size())}, at::kDouble);
  const at::Tensor counts = std::get<0>(at::histogram(values, tensor)).contiguous();
  const auto* begin = counts.const_data_ptr<double>();
  return {{begin, begin + counts.numel()}, edges};
}

Counts count(const at::Tensor& values, int64_t bins, double min, double max) {
  TORCH_CHECK_VALUE(bins > 0, "add_histogram: `bins` is ", bins, "; it is a number of bins, at least 1");
  TORCH_CHECK_VALUE(std::isfinite(min) && std::isfinite(max), "autodetected range of [", min, ", ", max,
                    "] is not finite; give add_histogram edges, or \"tensorflow\"");
  const auto [counts, edges] = at::histogram(values, bins);
  const auto* count_data = counts.const_data_ptr<double>();
  const auto* edge_data = edges.const_data_ptr<double>();
  return {{count_data, count_data + bins}, {edge_data, edge_data + bins + 1}};
}

Counts count(const at::Tensor& values, const SummaryWriter::Bins& bins, double min, double max) {
  if (const auto* number = std::get_if<int64_t>(&bins)) return count(values, *number, min, max);
  if (const auto* edges = std::get_if<std::vector<double>>(&bins)) return count(values, *edges);
  const auto& name = std::get<std::string>(bins);
  TORCH_CHECK_VALUE(name == "tensorflow", "add_histogram: `bins` is '", name,
                    "'; it takes \"tensorflow\", a number of bins, or their edges");
  return count(values, tensorflow_edges());
}

/// Adds up neighbours until there are about `max_bins`.
Counts subsample(const Counts& all, size_t max_bins) {
  const size_t step = all.counts.size() / max_bins;
  Counts few;
  for (size_t begin = 0; begin < all.counts.size(); begin += step) {
    double sum = 0;
    for (size_t i = begin; i < std::min(begin + step, all.counts.size()); ++i) sum += all.counts[i];
    few.counts.push_back(sum);
    few.edges.push_back(all.edges[begin]);
  }
  few.edges.push_back(all.edges.back());
  return few;
}

}  // namespace

Histogram make_histogram(const at::Tensor& values, const SummaryWriter::Bins& bins,
                         std::optional<int64_t> max_bins) {
  TORCH_CHECK_VALUE(values.numel() > 0, "The input has no element.");
  TORCH_CHECK_VALUE(!max_bins || *max_bins > 0, "add_histogram: max_bins is ", *max_bins,
                    "; it is a number of bins, at least 1");
  const at::Tensor flat = values.detach().cpu().to(at::kDouble).reshape(-1).contiguous();
  const auto [min_tensor, max_tensor] = at::aminmax(flat);
  Histogram result;
  result.min = min_tensor.item<double>();
  result.max = max_tensor.item<double>();
  result.num = static_cast<double>(flat.numel());
  result.sum = flat.sum().item<double>();
  result.sum_squares = at::dot(flat, flat).item<double>();

  Counts all = count(flat, bins, result.min, result.max);
  if (max_bins && all.counts.size() > static_cast<size_t>(*max_bins))
    all = subsample(all, static_cast<size_t>(*max_bins));
  const auto holds = [](double counted) { return counted > 0; };
  const auto first = std::find_if(all.counts.begin(), all.counts.end(), holds);
  TORCH_CHECK_VALUE(first != all.counts.end(), "add_histogram: none of ", flat.numel(), " values, from ",
                    result.min, " to ", result.max,
                    ", lies in a bin; look for NaN and infinities, or give other bins");
  const auto last = std::find_if(all.counts.rbegin(), all.counts.rend(), holds).base();
  // TensorBoard knows upper ends only, so an empty bin before the first tells where that begins.
  result.bucket_counts.push_back(0);
  result.bucket_counts.insert(result.bucket_counts.end(), first, last);
  const auto edge = all.edges.begin() + (first - all.counts.begin());
  result.bucket_limits.assign(edge, edge + (last - first) + 1);
  return result;
}

}  // namespace lockstep::observe::internal

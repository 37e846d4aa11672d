#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/generator_state.h>
#include <lockstep/parallel/pipeline/balance.h>
#include <lockstep/parallel/pipeline/internal/pipe_value.h>

namespace lockstep {
namespace {

using pipeline::internal::set_tensors;
using pipeline::internal::tensors_of;
using torch::nn::AnyValue;

/// For each number of blocks and of layers, the smallest total of a cut, where a block's price counts into
/// the total by `join`; returns where the last blocks begin.
template <class Price, class Join>
std::vector<std::vector<size_t>> best_cuts(size_t layers, size_t blocks, const Price& price, const Join& join,
                                           double* total) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<double> best(layers + 1, kNone);  // of the first layers, in the blocks so far
  best[0] = 0;
  std::vector<std::vector<size_t>> begins(blocks, std::vector<size_t>(layers + 1, 0));
  for (size_t block = 0; block < blocks; ++block) {
    std::vector<double> next(layers + 1, kNone);
    for (size_t end = block + 1; end <= layers; ++end) {
      for (size_t begin = block; begin < end; ++begin) {
        const double cost = join(best[begin], price(begin, end));
        if (cost <= next[end]) {  // of equals the one with more in front
          next[end] = cost;
          begins[block][end] = begin;
        }
      }
    }
    best = std::move(next);
  }
  *total = best[layers];
  return begins;
}

/// Puts back what a trial of layers changes.
class Untouched {
 public:
  explicit Untouched(const torch::nn::Module& module) {
    generators_.take(accelerator_generators());
    for (const auto& buffer : module.buffers()) buffers_.emplace_back(buffer, buffer.detach().clone());
  }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;
  ~Untouched() {
    const c10::AutoGradMode no_grad(false);
    for (auto& [buffer, saved] : buffers_) buffer.copy_(saved);
    generators_.restore();
  }

 private:
  GeneratorStates generators_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

void check(int64_t partitions, const torch::nn::Sequential& module, const at::Tensor& sample) {
  TORCH_CHECK_VALUE(!module.is_empty() && !module->is_empty(), "balance: the module has no layers");
  TORCH_CHECK_VALUE(sample.defined() && sample.dim() > 0,
                    "balance: the sample has no first dimension, along which micro-batches are cut");
  TORCH_CHECK_VALUE(partitions >= 1 && partitions <= static_cast<int64_t>(module->size()),
                    "balance: ", partitions, " partitions of ", module->size(),
                    " layers; each partition has at least one layer");
}

/// Forward and backward of one layer; `value` becomes its output, cut off from its graph.
double seconds_of(torch::nn::AnyModule& layer, AnyValue& value, c10::Device device) {
  std::vector<at::Tensor> inputs, copies;  // copies, for the layer may work in place
  for (const auto& tensor : tensors_of(value)) {
    inputs.push_back(tensor.detach().requires_grad_(tensor.requires_grad()));
    copies.push_back(inputs.back().clone());
  }
  set_tensors(value, copies);
  auto wanted = layer.ptr()->parameters();
  wanted.insert(wanted.end(), inputs.begin(), inputs.end());
  std::erase_if(wanted, [](const at::Tensor& tensor) { return !tensor.requires_grad(); });
  synchronize(device);
  const auto begin = std::chrono::steady_clock::now();
  value = layer.any_forward(std::move(value));
  std::vector<at::Tensor> outputs;
  for (const auto& tensor : tensors_of(value)) {
    if (tensor.requires_grad()) outputs.push_back(tensor);
  }
  if (!outputs.empty() && !wanted.empty()) {
    std::vector<at::Tensor> gradients;  // of any values
    for (const auto& output : outputs) gradients.push_back(output.detach());
    torch::autograd::grad(outputs, wanted, gradients, std::nullopt, /*create_graph=*/false,
                          /*allow_unused=*/true);
  }
  synchronize(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

std::vector<int64_t> balance_cost(const std::vector<double>& costs, int64_t partitions) {
  const size_t layers = costs.size();
  TORCH_CHECK_VALUE(partitions >= 1 && static_cast<size_t>(partitions) <= layers, "balance: ", partitions,
                    " partitions of ", layers, " layers; each partition has at least one layer");
  std::vector<double> sums{0};  // of the first layers
  for (size_t i = 0; i < layers; ++i) {
    TORCH_CHECK_VALUE(std::isfinite(costs[i]) && costs[i] >= 0, "balance: layer ", i, " costs ", costs[i]);
    sums.push_back(sums.back() + costs[i]);
  }
  const auto blocks = static_cast<size_t>(partitions);
  const auto cost = [&](size_t begin, size_t end) { return sums[end] - sums[begin]; };
  double largest = 0;
  best_cuts(
      layers, blocks, cost, [](double before, double block) { return std::max(before, block); }, &largest);
  double squares = 0;
  const auto begins = best_cuts(
      layers, blocks, cost,
      [&](double before, double block) {
        return block <= largest ? before + block * block : std::numeric_limits<double>::infinity();
      },
      &squares);
  std::vector<int64_t> balance(blocks);
  size_t end = layers;
  for (size_t block = blocks; block-- > 0;) {
    balance[block] = static_cast<int64_t>(end - begins[block][end]);
    end = begins[block][end];
  }
  return balance;
}

std::vector<int64_t> balance_by_time(int64_t partitions, const torch::nn::Sequential& module,
                                     const at::Tensor& sample, const BalanceByTimeOptions& options) {
  check(partitions, module, sample);
  const Untouched untouched(*module);
  const c10::AutoGradMode grad_mode(true);
  std::vector<torch::nn::AnyModule> layers(module->begin(), module->end());
  std::vector<double> times(layers.size(), std::numeric_limits<double>::max());
  const auto end = std::chrono::steady_clock::now() + options.timeout;
  for (int round = 0; round < 2 || std::chrono::steady_clock::now() < end; ++round) {
    AnyValue value{sample.detach()};
    for (size_t i = 0; i < layers.size(); ++i) {
      times[i] = std::min(times[i], seconds_of(layers[i], value, sample.device()));
    }
  }
  return balance_cost(times, partitions);
}

std::vector<int64_t> balance_by_size(int64_t partitions, const torch::nn::Sequential& module,
                                     const at::Tensor& sample, const BalanceBySizeOptions& options) {
  check(partitions, module, sample);
  TORCH_CHECK_VALUE(options.chunks >= 1, "balance_by_size: chunks is ", options.chunks, "; it is at least 1");
  TORCH_CHECK_VALUE(options.param_scale >= 0, "balance_by_size: param_scale is ", options.param_scale);
  const Untouched untouched(*module);
  const c10::AutoGradMode no_grad(false);
  std::vector<double> sizes;
  AnyValue value{sample.chunk(options.chunks)[0].clone()};  // for the first layer may work in place
  for (torch::nn::AnyModule layer : *module) {
    value = layer.any_forward(std::move(value));
    double size = 0;
    for (const auto& output : tensors_of(value)) size += static_cast<double>(output.nbytes());
    for (const auto& parameter : layer.ptr()->parameters()) {
      size += options.param_scale * static_cast<double>(parameter.nbytes());
    }
    sizes.push_back(size);
  }
  return balance_cost(sizes, partitions);
}

}  // namespace lockstep

#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <torch/torch.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/tensors.h>

/// A model and data that the tests of this room share.
namespace lockstep::testing {

/// Sample i: four numbers that follow from i, of which the first is i itself; and a target.
struct Points {
  int64_t count = 0;
  int64_t size() const { return count; }
  data::Example get_batch(std::span<const int64_t> indices) const {
    auto x = torch::empty({static_cast<int64_t>(indices.size()), 4}, torch::kDouble);
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto i = static_cast<double>(indices[row]);
      auto* values = x.mutable_data_ptr<double>() + 4 * row;
      values[0] = i, values[1] = std::sin(i), values[2] = std::cos(3 * i), values[3] = std::sin(7 * i);
    }
    return {x, x.slice(1, 1).sum(1, /*keepdim=*/true)};
  }
  data::Example get(int64_t index) const { return get_batch({&index, 1}); }
};

using Loader = data::DataLoader<Points>;

/// The samples of a batch.
inline std::vector<int64_t> ids(const data::Example& batch) {
  std::vector<int64_t> ids;
  const auto first = batch.data.select(1, 0).to(torch::kLong).contiguous();
  ids.assign(first.const_data_ptr<int64_t>(), first.const_data_ptr<int64_t>() + first.numel());
  return ids;
}

/// Does not see the index. With `dropout` it draws random numbers in training.
struct SmallNet : torch::nn::Module {
  explicit SmallNet(double dropout = 0) : dropout(dropout) {
    torch::manual_seed(3);
    hidden = register_module("hidden", torch::nn::Linear(3, 8));
    output = register_module("output", torch::nn::Linear(8, 1));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return output(torch::dropout(torch::tanh(hidden(x.slice(1, 1))), dropout, is_training()));
  }
  double dropout;
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};

inline const auto loss_of = [](auto& model, const data::Example& batch) {
  return torch::nn::functional::mse_loss(model.forward(batch.data), batch.target);
};

}  // namespace lockstep::testing

#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/testing/tensors.h>

/// Modules that the tests of DataParallel share, and what compares them with the module alone.
namespace lockstep::testing {

/// A tied weight, a frozen one, an unused one, several arguments and a nest of outputs.
struct Nested : torch::nn::Cloneable<Nested> {
  using Output = std::tuple<torch::Tensor, std::vector<torch::Tensor>,
                            std::map<std::string, std::pair<torch::Tensor, int>>>;
  Nested() { reset(); }
  void reset() override {
    ++made;
    first = register_module("first", torch::nn::Linear(6, 5));
    last = register_module("last", torch::nn::Linear(5, 6));
    tied = register_parameter("tied", first->weight);
    frozen = register_parameter("frozen", torch::randn({6}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::randn({2}));
    to(torch::kDouble);
  }
  Output forward(const torch::Tensor& x, std::pair<torch::Tensor, torch::Tensor> more, double scale,
                 const std::string& name) {
    const auto hidden = torch::tanh(first(x) + more.first) * scale;
    const auto y = last(hidden) * frozen + torch::matmul(hidden, tied);
    return {y, {hidden, y.sum(1)}, {{name, {y * more.second, 3}}}};
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::Tensor tied, frozen, unused;
  static inline std::atomic<int> made = 0;
};

/// A convolution with batch normalisation and dropout that tests switch on.
struct CnnImpl : torch::nn::Cloneable<CnnImpl> {
  explicit CnnImpl(double dropout = 0) : rate(dropout) { reset(); }
  void reset() override {
    convolution =
        register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 3, 3).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(3));
    drop = register_module("drop", torch::nn::Dropout(rate));
    last = register_module("last", torch::nn::Linear(3 * 4 * 4, 4));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(drop(torch::relu(norm(convolution(x)))).flatten(1));
  }
  double rate;
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Cnn);

/// Does what a test says.
struct Calling : torch::nn::Cloneable<Calling> {
  using Function = std::function<torch::Tensor(const torch::Tensor& x, const torch::Tensor& weight)>;
  explicit Calling(Function act) : act(std::move(act)) { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({3}, torch::kDouble)); }
  torch::Tensor forward(const torch::Tensor& x) { return act(x, weight); }
  Function act;
  torch::Tensor weight;
};
inline std::shared_ptr<Calling> calling(Calling::Function act) {
  return std::make_shared<Calling>(std::move(act));
}

/// A module with the same values, to train alone. (A clone() would not tie the weight.)
inline std::shared_ptr<Nested> copy_of(const std::shared_ptr<Nested>& net) {
  auto copy = std::make_shared<Nested>();
  copy->to(net->tied.device());
  const torch::NoGradGuard no_grad;
  const auto values = net->named_parameters();
  for (auto& item : copy->named_parameters()) item.value().copy_(values[item.key()]);
  return copy;
}
inline std::shared_ptr<Calling> copy_of(const std::shared_ptr<Calling>& net) {
  return calling(net->act);
}

inline void expect_close(const torch::Tensor& actual, const torch::Tensor& expected,
                         const std::string& what = "") {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_EQ(actual.dtype(), expected.dtype()) << what;
  if (actual.numel() == 0) return;
  const double bound = 1e-10 * std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((actual - expected).abs().max().item<double>(), bound) << what;
}

template <class One, class Other>
void expect_same_gradients(const One& one, const Other& other) {
  const auto expected = other.named_parameters();
  for (const auto& item : one.named_parameters()) {
    expect_close(item.value().grad(), expected[item.key()].grad(), "gradient of " + item.key());
  }
}

/// A fixed function of all tensors in an output.
template <class Output>
torch::Tensor weighted_sum(const Output& output) {
  auto sum = torch::zeros({}, torch::kDouble);
  int seed = 100;
  for_each_tensor(output, [&](const torch::Tensor& tensor) {
    sum = sum + (tensor.to(torch::kDouble) * random(tensor.sizes(), seed++)).sum();
  });
  return sum;
}

}  // namespace lockstep::testing

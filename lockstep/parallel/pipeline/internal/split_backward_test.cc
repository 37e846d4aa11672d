#include <functional>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/parallel/pipeline/internal/split_backward.h>
#include <lockstep/testing/expect_equal.h>

namespace lockstep::split_backward_test {
namespace {

namespace nn = torch::nn;
using pipeline::internal::backward_inputs;
using pipeline::internal::InputBackward;
using Tensors = std::vector<at::Tensor>;
using Forward = std::function<Tensors(const Tensors& inputs)>;

struct Gradients {
  Tensors of_inputs, of_weights;
};

/// With random gradients of the outputs, twice, so that gradients add up.
Gradients compute(bool split, const Forward& forward, const Tensors& weights, const Tensors& input_values) {
  for (const auto& weight : weights) weight.mutable_grad() = at::Tensor();
  Gradients result;
  for (int round = 0; round < 2; ++round) {
    Tensors inputs;
    for (const auto& value : input_values) inputs.push_back(value.clone().requires_grad_());
    torch::manual_seed(7 + round);
    torch::autograd::edge_list roots;
    torch::autograd::variable_list gradients;
    {
      const Tensors outputs = forward(inputs);
      for (const auto& output : outputs) {
        roots.push_back(torch::autograd::impl::gradient_edge(output));
        gradients.push_back(torch::randn_like(output));
      }
    }
    if (split) {
      InputBackward half = backward_inputs(roots, gradients, inputs);
      for (const auto& gradient : half.gradients) result.of_inputs.push_back(gradient);
      roots.clear();
      half.weights.run();
    } else {
      torch::autograd::Engine::get_default_engine().execute(roots, gradients, false, false, true);
      for (const auto& input : inputs) result.of_inputs.push_back(input.grad());
    }
  }
  for (const auto& weight : weights)
    result.of_weights.push_back(weight.grad().defined() ? weight.grad().clone() : at::Tensor());
  return result;
}

void expect_bits_of_whole_backward(const Forward& forward, const Tensors& weights, const Tensors& inputs) {
  const Gradients whole = compute(false, forward, weights, inputs);
  const Gradients halves = compute(true, forward, weights, inputs);
  testing::expect_equal(halves.of_inputs, whole.of_inputs, "input");
  testing::expect_equal(halves.of_weights, whole.of_weights, "weight");
  bool any = weights.empty();
  for (const auto& gradient : whole.of_weights) any = any || gradient.defined();
  EXPECT_TRUE(any) << "nothing was compared";
}

class SplitBackward : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

TEST_F(SplitBackward, OfLayersInARow) {
  nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(nn::Linear(24, 24));
    net->push_back(nn::Tanh());
    net->push_back(nn::Dropout(0.2));
  }
  expect_bits_of_whole_backward([&](const Tensors& in) { return Tensors{net->forward(in[0])}; },
                                net->parameters(), {torch::randn({8, 24})});
}

TEST_F(SplitBackward, OfATransformerLayer) {
  nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(32, 4).dropout(0.1));
  expect_bits_of_whole_backward([&](const Tensors& in) { return Tensors{layer(in[0])}; }, layer->parameters(),
                                {torch::randn({6, 3, 32})});
}

TEST_F(SplitBackward, OfConvolutionsWithBatchNorm) {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::BatchNorm2d(8), nn::ReLU(),
                     nn::Conv2d(nn::Conv2dOptions(8, 8, 3)), nn::Flatten(), nn::Linear(8 * 4 * 4, 5));
  expect_bits_of_whole_backward([&](const Tensors& in) { return Tensors{net->forward(in[0])}; },
                                net->parameters(), {torch::randn({4, 3, 8, 8})});
}

TEST_F(SplitBackward, OfARecurrentNet) {
  nn::LSTM layer(nn::LSTMOptions(6, 6).num_layers(2));
  expect_bits_of_whole_backward([&](const Tensors& in) { return Tensors{std::get<0>(layer(in[0]))}; },
                                layer->parameters(), {torch::randn({5, 2, 6})});
}

TEST_F(SplitBackward, OfACheckpointedPart) {
  nn::Linear first(6, 6), second(6, 6), third(6, 6);
  Tensors weights = first->parameters();
  for (const auto& more : {second->parameters(), third->parameters()}) {
    weights.insert(weights.end(), more.begin(), more.end());
  }
  const auto part = [&](const at::Tensor& x) {
    return second(torch::dropout(torch::tanh(first(x)), 0.3, /*train=*/true));
  };
  expect_bits_of_whole_backward(
      [&](const Tensors& in) { return Tensors{third(activation_checkpoint({}, part, in[0]))}; }, weights,
      {torch::randn({5, 6})});
}

TEST_F(SplitBackward, OfAWeightThatIsUsedSeveralTimes) {
  const auto weight = torch::randn({5, 5}).requires_grad_();
  const auto other = torch::randn({5}).requires_grad_();
  expect_bits_of_whole_backward([&](const Tensors& in) { return Tensors{in[0].mm(weight).mm(weight)}; },
                                {weight}, {torch::randn({3, 5})});
  expect_bits_of_whole_backward(
      [&](const Tensors& in) {
        auto x = in[0];
        for (int i = 0; i < 4; ++i)
          x = torch::tanh(x.mm(weight)) * torch::sigmoid(other);  // kept between the uses
        return Tensors{x};
      },
      {weight, other}, {torch::randn({3, 5})});
  // With layers of their own between the uses.
  nn::Linear first(5, 5), second(5, 5);
  Tensors weights{weight};
  for (const auto& more : {first->parameters(), second->parameters()}) {
    weights.insert(weights.end(), more.begin(), more.end());
  }
  expect_bits_of_whole_backward(
      [&](const Tensors& in) {
        const auto x = torch::tanh(first(torch::relu(in[0].mm(weight))));
        return Tensors{second(torch::tanh(x.mm(weight)) + x), weight.sum()};
      },
      weights, {torch::randn({3, 5})});
}

TEST_F(SplitBackward, OfPartsOfAWeightAndOfWeightsThatMeetBefore) {
  const auto weight = torch::randn({6, 4}).requires_grad_();
  expect_bits_of_whole_backward(
      [&](const Tensors& in) {
        const auto parts = weight.chunk(2);
        return Tensors{in[0].mm(parts[0].t()) * torch::sigmoid(in[0].mm(parts[1].t()))};
      },
      {weight}, {torch::randn({3, 4})});
  const auto scale = torch::randn({6}).requires_grad_(), bias = torch::randn({6}).requires_grad_();
  expect_bits_of_whole_backward(
      [&](const Tensors& in) {
        const auto normed = scale.unsqueeze(1) * weight / weight.norm(2, 1, true);
        return Tensors{torch::tanh(nn::functional::linear(in[0], normed, bias))};
      },
      {weight, scale, bias}, {torch::randn({5, 4})});
}

TEST_F(SplitBackward, OfSeveralInputsAndOutputs) {
  nn::Linear first(4, 4), second(4, 4), unused(2, 2);
  const auto alone = torch::randn({4}).requires_grad_();
  Tensors weights = first->parameters();
  for (const auto& more : {second->parameters(), unused->parameters(), Tensors{alone}}) {
    weights.insert(weights.end(), more.begin(), more.end());
  }
  expect_bits_of_whole_backward(
      [&](const Tensors& in) {
        const auto x = first(in[0]);
        // An output to which no input leads, also through a weight that inputs meet; and an input that is not used.
        return Tensors{second(x) + in[1], torch::exp(alone), x * alone,
                       second->weight.sum() * torch::exp(alone)};
      },
      weights, {torch::randn({3, 4}), torch::randn({3, 4}), torch::randn({2})});
}

TEST_F(SplitBackward, OfNoInputsLeavesAllForTheSecondHalf) {
  nn::Sequential net(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 2));
  const auto x = torch::randn({3, 4});
  expect_bits_of_whole_backward([&](const Tensors&) { return Tensors{net->forward(x)}; }, net->parameters(),
                                {});
}

/// Counts the tensors that live.
at::Tensor counted(int& living) {
  ++living;
  auto* memory = new float[4]();
  return at::from_blob(
      memory, {4},
      [&living](void* freed) {
        --living;
        delete[] static_cast<float*>(freed);
      },
      at::kFloat);
}

TEST_F(SplitBackward, FreesWhatOnlyTheFirstHalfNeeds) {
  int for_inputs = 0, for_weights = 0;
  const auto weight = torch::randn({4}).requires_grad_();
  const auto input = torch::randn({4}).requires_grad_();
  torch::autograd::edge_list roots;
  {
    const auto x = torch::tanh(input) * counted(for_inputs);  // saved for the gradient of the input
    const auto y = x + weight * counted(for_weights);         // saved for that of the weight
    roots.push_back(torch::autograd::impl::gradient_edge(y));
  }
  EXPECT_EQ(for_inputs, 1);
  InputBackward half = backward_inputs(roots, {torch::ones({4})}, {input});
  roots.clear();
  EXPECT_EQ(for_inputs, 0);
  EXPECT_EQ(for_weights, 1);
  half.weights.run();
  EXPECT_EQ(for_weights, 0);
}

}  // namespace
}  // namespace lockstep::split_backward_test

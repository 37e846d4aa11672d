#include <array>
#include <functional>
#include <gmock/gmock.h>
#include <string>
#include <thread>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

// parity/activation_checkpoint_parity_test.py compares gradients and what runs when with torch.utils.checkpoint.
namespace lockstep::activation_checkpoint_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;

/// Layers with dropout between them, which count how often they run.
struct Block {
  torch::nn::Linear first{torch::nn::LinearOptions(6, 8)};
  torch::nn::Linear second{torch::nn::LinearOptions(8, 6)};
  int runs = 0;
  Block() { first->to(at::kDouble), second->to(at::kDouble); }
  at::Tensor operator()(const at::Tensor& x) {
    ++runs;
    return x + second(torch::dropout(torch::relu(first(x)), 0.5, /*train=*/true));
  }
  std::vector<at::Tensor> parameters() const {
    return {first->weight, first->bias, second->weight, second->bias};
  }
};

/// The gradients of a chain of the blocks, and of its input.
std::vector<at::Tensor> gradients(std::vector<Block>& blocks, bool checkpointed) {
  torch::manual_seed(5);
  const at::Tensor input = random({4, 6}, 1).requires_grad_();
  at::Tensor x = input;
  for (auto& block : blocks) x = checkpointed ? activation_checkpoint({}, std::ref(block), x) : block(x);
  std::vector<at::Tensor> sources{input};
  for (auto& block : blocks) {
    for (const auto& parameter : block.parameters()) sources.push_back(parameter);
  }
  return torch::autograd::grad({x.square().sum()}, sources);
}

TEST(ActivationCheckpoint, GradientsAreThoseWithoutIt) {
  std::vector<Block> blocks(3);
  const auto expected = gradients(blocks, false);
  testing::expect_equal(gradients(blocks, true), expected);
  for (const Block& block : blocks)
    EXPECT_EQ(block.runs, 3) << "one without it, forward, and once again in backward";
}

TEST(ActivationCheckpoint, RandomNumbersAreDrawnAgainAndTheNextOnesAreAsWithoutIt) {
  const at::Tensor x = random({100}).requires_grad_();
  const auto noisy = [](const at::Tensor& tensor) { return tensor * torch::rand_like(tensor); };
  torch::manual_seed(1);
  const at::Tensor factor = torch::rand_like(x), next = torch::rand({3}), last = torch::rand({3});
  torch::manual_seed(1);
  const at::Tensor y = activation_checkpoint({}, noisy, x);
  EXPECT_TRUE(at::equal(torch::rand({3}), next));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), factor));
  EXPECT_TRUE(at::equal(torch::rand({3}), last)) << "backward drew none of them";
  torch::manual_seed(1);
  activation_checkpoint({.preserve_rng_state = false}, noisy, x.detach().requires_grad_()).sum().backward();
  EXPECT_FALSE(at::equal(torch::rand({3}), next));
}

TEST(ActivationCheckpoint, WhatOperationsSaveIsGoneUntilBackward) {
  const at::Tensor x = random({50}).requires_grad_();
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inner;
  const auto function = [&](const at::Tensor& tensor) {
    const at::Tensor middle = tensor.exp();
    inner.push_back(middle.storage().getWeakStorageImpl());
    return middle.sin();
  };
  at::Tensor y = activation_checkpoint({}, function, x);
  EXPECT_TRUE(inner.at(0).expired());
  y.sum().backward();
  ASSERT_EQ(inner.size(), 2U);
  EXPECT_TRUE(inner.at(1).expired()) << "used once";
  EXPECT_TRUE(testing::difference(x.grad(), x.exp().cos() * x.exp()) < 1e-12);
}

TEST(ActivationCheckpoint, InputsAreGoneWithTheGraph) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> kept;
  at::Tensor y;
  {
    at::Tensor x = random({50}).requires_grad_() * 1;
    kept.push_back(x.storage().getWeakStorageImpl());
    y = activation_checkpoint(
        {}, [](const at::Tensor& tensor) { return tensor.exp(); }, x);
  }
  EXPECT_FALSE(kept.at(0).expired());
  y.sum().backward();
  EXPECT_TRUE(kept.at(0).expired());
}

TEST(ActivationCheckpoint, EndsAsSoonAsAllIsThere) {
  const at::Tensor x = random({5}).requires_grad_();
  for (const bool early : {true, false}) {
    std::string events;
    const auto function = [&](const at::Tensor& tensor) {
      events += "begin ";
      const at::Tensor y = tensor.exp().sin();
      events += "end ";
      return y;
    };
    activation_checkpoint({.early_stop = early}, function, x).sum().backward();
    EXPECT_EQ(events, early ? "begin end begin " : "begin end begin end ");
  }
}

TEST(ActivationCheckpoint, GraphsMayBeKeptAndDifferentiatedTwice) {
  const at::Tensor x = random({5}).requires_grad_();
  int runs = 0;
  const auto function = [&](const at::Tensor& tensor) {
    ++runs;
    return tensor.exp().sin();
  };
  const at::Tensor y = activation_checkpoint({}, function, x).sum();
  y.backward({}, /*retain_graph=*/true);
  y.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(runs, 3);
  const at::Tensor plain = random({5}).requires_grad_();
  const auto twice = [](const at::Tensor& result, const at::Tensor& input) {
    const auto first = torch::autograd::grad({result}, {input}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {input})[0];
  };
  EXPECT_TRUE(testing::difference(twice(y, x), twice(plain.exp().sin().sum(), plain)) < 1e-12);
}

TEST(ActivationCheckpoint, NestsAndDropsTheInnerOnesInputs) {
  const at::Tensor x = random({5}).requires_grad_();
  int outer = 0, inner = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> between;
  const auto inside = [&](const at::Tensor& tensor) {
    ++inner;
    return tensor.sin().exp();
  };
  const auto outside = [&](const at::Tensor& tensor) {
    ++outer;
    const at::Tensor middle = tensor.exp();
    between.push_back(middle.storage().getWeakStorageImpl());
    return activation_checkpoint({}, inside, middle).cos();
  };
  at::Tensor y = activation_checkpoint({}, outside, x);
  EXPECT_TRUE(between.at(0).expired());
  y.sum().backward();
  EXPECT_EQ(outer, 2);
  EXPECT_EQ(inner, 3) << "in the outer one's second run, and to compute what was dropped";
  const at::Tensor plain = random({5}).requires_grad_();
  plain.exp().sin().exp().cos().sum().backward();
  EXPECT_TRUE(testing::difference(x.grad(), plain.grad()) < 1e-12);
}

TEST(ActivationCheckpoint, TakesArgumentsAndResultsOfAnyForm) {
  const at::Tensor x = random({5}).requires_grad_(), z = random({5}, 2);
  const auto function = [](std::vector<at::Tensor>& tensors, double scale,
                           const std::optional<at::Tensor>& more) {
    at::Tensor sum = tensors[0].exp() * tensors[1];
    if (more) sum = sum + more->exp();
    return std::pair(sum * scale, std::string("done"));
  };
  std::vector<at::Tensor> tensors{x, z};
  const auto result = activation_checkpoint({}, function, tensors, 2.0, std::optional<at::Tensor>(x));
  EXPECT_EQ(result.second, "done");
  tensors.clear();
  result.first.sum().backward();
  EXPECT_TRUE(testing::difference(x.grad(), 2 * x.exp() * (z + 1)) < 1e-12);

  at::Tensor kept;
  activation_checkpoint(
      {}, [&](const at::Tensor& tensor) { kept = tensor.exp(); }, x);
  EXPECT_TRUE(kept.defined());
  torch::nn::Linear layer(5, 2);
  layer->to(at::kDouble);
  activation_checkpoint({}, layer, random({3, 5})).sum().backward();
  EXPECT_TRUE(layer->weight.grad().defined()) << "no input needs a gradient";
}

TEST(ActivationCheckpoint, WithoutGradientsItJustRuns) {
  int runs = 0;
  const at::NoGradGuard no_grad;
  const auto y = activation_checkpoint(
      {},
      [&](const at::Tensor& x) {
        ++runs;
        return x * 2;
      },
      torch::ones({2}).requires_grad_());
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(runs, 1);
}

TEST(ActivationCheckpoint, AutocastIsThatOfTheFirstRun) {
  const at::Tensor x = random({4, 4}, 0, at::kFloat).requires_grad_();
  torch::nn::Linear layer(4, 4);
  std::vector<at::ScalarType> types;
  at::Tensor y;
  {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    y = activation_checkpoint(
        {.early_stop = false},  // which would be within the second layer(tensor)
        [&](const at::Tensor& tensor) {
          const at::Tensor result = layer(tensor).exp();
          types.push_back(layer(tensor).scalar_type());
          return result + 1;
        },
        x);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  y.sum().backward();
  EXPECT_THAT(types, ElementsAre(at::kBFloat16, at::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(ActivationCheckpoint, ChangesInPlaceAreErrors) {
  const auto function = [](const at::Tensor& tensor) { return tensor.exp().sin(); };
  at::Tensor x = random({5}).requires_grad_() * 1;
  at::Tensor y = activation_checkpoint({}, function, x);
  x.add_(1);
  EXPECT_THAT(message_of<c10::Error>([&] { y.sum().backward(); }),
              HasSubstr("modified by an inplace operation"));

  torch::nn::Linear layer(5, 5);
  layer->to(at::kDouble);
  y = activation_checkpoint(
      {}, [&](const at::Tensor& tensor) { return layer(tensor).exp(); }, random({2, 5}).requires_grad_());
  {
    const at::NoGradGuard no_grad;
    layer->weight.mul_(2);
  }
  EXPECT_THAT(message_of<c10::Error>([&] { y.sum().backward(); }),
              AllOf(HasSubstr("modified by an inplace operation"), HasSubstr("It is a parameter")));
}

TEST(ActivationCheckpoint, AFunctionThatDoesSomethingElseIsAnError) {
  const at::Tensor x = random({5}).requires_grad_();
  const auto complaint = [&](std::function<at::Tensor(const at::Tensor&, int)> function,
                             const ActivationCheckpointOptions& options = {}) {
    int runs = 0;
    const at::Tensor y = activation_checkpoint(
        options, [&](const at::Tensor& tensor) { return function(tensor, ++runs); }, x);
    return message_of<c10::Error>([&] { y.sum().backward(); });
  };
  EXPECT_THAT(complaint([](const at::Tensor& t, int run) { return run == 1 ? t.exp().sin() : t.exp(); }),
              HasSubstr("it saved 1 tensors instead of 2"));
  EXPECT_THAT(complaint([](const at::Tensor& t, int run) { return run == 1 ? t.exp() : t.exp().sin(); },
                        {.early_stop = false}),
              HasSubstr("trying to save more tensors"));
  EXPECT_THAT(
      complaint([](const at::Tensor& t, int run) { return (run == 1 ? t : t.slice(0, 0, 2)).exp().sum(); }),
      HasSubstr("was Double [5] on cpu and is Double [2] on cpu now"));
  EXPECT_THAT(complaint([](const at::Tensor& t, int run) {
                TORCH_CHECK(run == 1, "not today");
                return t.exp();
              }),
              HasSubstr("not today"));
}

TEST(ActivationCheckpoint, ThreadsDoNotDisturbEachOther) {
  std::array<double, 4> differences{};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < differences.size(); ++i) {
    threads.emplace_back([&differences, i] {
      const at::Tensor x = random({20}, i).requires_grad_();
      at::Tensor y = x;
      for (int layer = 0; layer < 10; ++layer) {
        y = activation_checkpoint(
            {}, [](const at::Tensor& tensor) { return tensor.sin().exp(); }, y);
      }
      y.sum().backward();
      const at::Tensor plain = random({20}, i).requires_grad_();
      at::Tensor z = plain;
      for (int layer = 0; layer < 10; ++layer) z = z.sin().exp();
      z.sum().backward();
      differences[i] = testing::difference(x.grad(), plain.grad());
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(differences, ::testing::Each(0.0));
}

}  // namespace
}  // namespace lockstep::activation_checkpoint_test

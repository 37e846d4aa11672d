// Where gradients lie: written into the buckets by their kernels, never over what the user keeps.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/ddp/distributed_data_parallel.h>
#include <lockstep/ddp/testing/fixtures.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::gradient_memory_test {
namespace {

namespace nn = torch::nn;
using testing::close;
using testing::data;
using testing::make_double;
using testing::mean_over_ranks;
using testing::run_ranks;

/// All layers of one size, so that gradients and activations' gradients have equal sizes, too.
struct Square : nn::Module {
  explicit Square(int64_t width, int layers) {
    for (int i = 0; i < layers; ++i) {
      layers_.push_back(register_module("layer" + std::to_string(i), nn::Linear(width, width)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers_) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<nn::Linear> layers_;
};

struct Attention : nn::Module {
  Attention() {
    register_module("embedding", embedding), register_module("attention", attention),
        register_module("norm", norm);
    register_module("conv", conv);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens).transpose(0, 1);
    x = norm(x + std::get<0>(attention(x, x, x)));
    x = conv(x.permute({1, 2, 0})).permute({2, 0, 1});
    return torch::matmul(x, embedding->weight.t());  // tied
  }
  nn::Embedding embedding{20, 8};
  nn::MultiheadAttention attention{8, 2};
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::Conv1d conv{nn::Conv1dOptions(8, 8, 3).padding(1)};
};

template <class Model>
int64_t number(const Model& model, const char* name) {
  return model.get_ddp_logging_data().ints_map.at(name);
}

/// Gradients of `net` on `x`, computed apart, averaged.
template <class Net>
std::vector<torch::Tensor> expected_gradients(const std::shared_ptr<Net>& net, const torch::Tensor& x) {
  std::vector<torch::Tensor> answer;
  for (const auto& gradient : torch::autograd::grad({net->forward(x).square().sum()}, net->parameters())) {
    answer.push_back(mean_over_ranks(gradient));
  }
  return answer;
}

TEST(GradientMemory, KernelsWriteIntoTheBuckets) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(16, 4);
    DistributedDataParallel model(net);
    for (int step = 0; step < 5; ++step) {
      const auto x = data(rank, {16, 16}, step);  // as large as the weights
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), expected[i])) << "step " << step << " parameter " << i;
      }
      EXPECT_EQ(number(model, "gradient_bytes"), 4 * (16 * 16 + 16) * 8);
      // The first round's order is not known before; the second's buckets are others.
      if (step >= 2) {
        EXPECT_EQ(number(model, "gradient_bytes_in_place"), 4 * (16 * 16 + 16) * 8) << step;
      }
    }
  });
}

TEST(GradientMemory, MostOfATransformersAreWrittenThere) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Attention>();
    DistributedDataParallel model(net);
    for (int step = 0; step < 5; ++step) {
      const auto tokens = data(rank, {3, 7}, step).abs().mul(7).to(at::kLong).remainder(20);
      const auto expected = expected_gradients(net, tokens);
      net->zero_grad();
      model(tokens).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), expected[i], 1e-10))
            << "step " << step << " parameter " << i;
      }
    }
    EXPECT_GT(number(model, "gradient_bytes_in_place"), number(model, "gradient_bytes") / 2);
  });
}

TEST(GradientMemory, WhatTheUserKeepsIsNotWrittenOver) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 3);
    DistributedDataParallel model(net);
    std::vector<std::pair<torch::Tensor, torch::Tensor>> kept;  // a gradient, its values then
    for (int step = 0; step < 6; ++step) {
      const auto x = data(rank, {8, 8}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), expected[i])) << "step " << step << " parameter " << i;
      }
      const auto gradient = net->layers_[step % 3]->weight.grad();
      kept.emplace_back(gradient, gradient.clone());
      for (const auto& [tensor, values] : kept) ASSERT_TRUE(at::equal(tensor, values)) << "step " << step;
    }
  });
}

TEST(GradientMemory, GradientsOutliveModelAndGroup) {
  run_ranks(2, [](int rank) {
    torch::Tensor kept, values;
    {
      auto world = init_process_group();
      auto net = make_double<Square>(8, 2);
      DistributedDataParallel model(net);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        model(data(rank, {5, 8})).sum().backward();
      }
      kept = net->layers_[0]->weight.grad();
      values = kept.clone();
    }
    EXPECT_TRUE(at::equal(kept, values));
    kept.add_(1);
    EXPECT_TRUE(at::equal(kept, values + 1));
  });
}

TEST(GradientMemory, ChangingGraphsAndSizesOnlyCostCopies) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 4);
    DistributedDataParallel model(net);
    for (int step = 0; step < 12; ++step) {
      // Batches as large as the weights or not, intermediate results that live on, several uses of a layer.
      const auto x = data(rank, {step % 3 == 0 ? 8 : step, 8}, step);
      auto plain = make_double<Square>(8, 4);
      {
        torch::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); ++i)
          plain->parameters()[i].copy_(net->parameters()[i]);
      }
      std::vector<torch::Tensor> alive;
      const auto loss_of = [&](const torch::Tensor& output, bool hook) {
        if (hook && step % 2 == 0) {
          output.register_hook([&alive](const torch::Tensor& gradient) { alive.push_back(gradient * 2); });
        }
        return (output.square() * (step % 4 + 1)).sum();
      };
      net->zero_grad();
      loss_of(plain->forward(step % 5 == 0 ? plain->forward(x) : x), false).backward();
      loss_of(step % 5 == 0 ? model(net->forward(x)) : model(x), true).backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), mean_over_ranks(plain->parameters()[i].grad()), 1e-10))
            << "step " << step << " parameter " << i;
      }
    }
  });
}

TEST(GradientMemory, DimensionsOfOneHaveAnyStride) {
  /// Its weight's gradient arrives transposed: with the weight's sizes, and another stride where one is 1.
  struct Row : nn::Module {
    Row() { register_parameter("weight", weight); }
    torch::Tensor forward(const torch::Tensor& x) { return weight.t() * x; }
    torch::Tensor weight = torch::ones({1, 7}, at::kDouble).requires_grad_();
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool view : {false, true}) {
      auto net = std::make_shared<Row>();
      DistributedDataParallel model(net, {.gradient_as_bucket_view = view});
      for (int step = 0; step < 5; ++step) {
        const auto x = data(rank, {7, 1}, step);
        const auto expected = expected_gradients(net, x);
        net->zero_grad();
        model(x).square().sum().backward();
        ASSERT_TRUE(close(net->weight.grad(), expected[0])) << step;
      }
      EXPECT_EQ(number(model, "gradient_bytes_in_place"), number(model, "gradient_bytes"));
    }
  });
}

TEST(GradientMemory, BucketViewsShareTheBucketsStorage) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool view : {false, true}) {
      auto net = make_double<Square>(8, 2);
      DistributedDataParallel model(net, {.gradient_as_bucket_view = view});
      for (int step = 0; step < 4; ++step) {
        const auto x = data(rank, {8, 8}, step);
        const auto expected = expected_gradients(net, x);
        net->zero_grad(/*set_to_none=*/step % 2 == 0);
        model(x).square().sum().backward();
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_TRUE(close(net->parameters()[i].grad(), expected[i]))
              << "step " << step << " parameter " << i;
        }
      }
      const auto first = net->layers_[0]->weight.grad(), second = net->layers_[1]->weight.grad();
      EXPECT_EQ(first.storage().is_alias_of(second.storage()), view);
    }
  });
}

TEST(GradientMemory, AnExceptionInBackwardLeavesNoTrace) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 2);
    DistributedDataParallel model(net);
    for (int step = 0; step < 6; ++step) {
      const auto x = data(rank, {8, 8}, step);
      net->zero_grad();
      if (step == 3) {
        auto output = model(x);
        auto armed = std::make_shared<bool>(true);
        net->layers_[0]->weight.register_hook([armed](const torch::Tensor&) {
          if (std::exchange(*armed, false)) throw std::runtime_error("mine");
        });
        EXPECT_THROW(output.sum().backward(), std::runtime_error);
        model.reset();
        barrier();
        continue;
      }
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), expected[i])) << "step " << step << " parameter " << i;
      }
    }
  });
}

TEST(GradientMemory, DoubleBackwardThroughAGradient) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(4, 2);
    DistributedDataParallel model(net);
    for (int step = 0; step < 3; ++step) {
      const auto x = data(rank, {3, 4}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      auto norm = torch::zeros({}, at::kDouble);
      for (size_t i = 0; i < expected.size(); ++i) {
        const auto gradient = net->parameters()[i].grad();
        ASSERT_TRUE(close(gradient, expected[i])) << "step " << step << " parameter " << i;
        EXPECT_TRUE(gradient.requires_grad()) << "it has a history";
        norm = norm + gradient.square().sum();
      }
      const auto second = torch::autograd::grad({norm}, {net->layers_[0]->weight});
      EXPECT_GT(second[0].abs().sum().item<double>(), 0);
    }
  });
}

}  // namespace
}  // namespace lockstep::gradient_memory_test

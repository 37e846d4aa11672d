// Where gradients lie: written into the buckets by their kernels.
#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/reducer/testing/square_net.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::gradient_memory_test {
namespace {

namespace nn = torch::nn;
using testing::close;
using testing::data;
using testing::expected_gradients;
using testing::has_gradients;
using testing::make_double;
using testing::mean_over_ranks;
using testing::number;
using testing::run_ranks;
using testing::Square;

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
      ASSERT_TRUE(has_gradients(net, expected)) << "step " << step;
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
      ASSERT_TRUE(has_gradients(net, expected, 1, 1e-10)) << "step " << step;
    }
    EXPECT_GT(number(model, "gradient_bytes_in_place"), number(model, "gradient_bytes") / 2);
  });
}

TEST(GradientMemory, AccumulatedGradientsLieInTheBuckets) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(16, 4);
    DistributedDataParallel model(net);
    for (int step = 0; step < 5; ++step) {
      const auto x = data(rank, {16, 16}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      for (int pass = 0; pass < 2; ++pass) {
        auto guard = model.no_sync();
        model(x).square().sum().backward();
      }
      model(x).square().sum().backward();
      ASSERT_TRUE(has_gradients(net, expected, 3)) << "step " << step;
      if (step >= 2) {
        EXPECT_EQ(number(model, "gradient_bytes_in_place"), number(model, "gradient_bytes")) << step;
      }
    }
  });
}

TEST(GradientMemory, AccumulatedGradientsThatAreZeroedInPlaceMoveIntoTheBucketsOnce) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(16, 4);
    DistributedDataParallel model(net);
    for (int step = 0; step < 5; ++step) {
      const auto x = data(rank, {16, 16}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad(/*set_to_none=*/false);
      {
        auto guard = model.no_sync();
        model(x).square().sum().backward();
      }
      model(x).square().sum().backward();
      ASSERT_TRUE(has_gradients(net, expected, 2)) << "step " << step;
      EXPECT_EQ(number(model, "gradient_bytes_in_place"), step == 0 ? 0 : number(model, "gradient_bytes"))
          << step;
    }
  });
}

TEST(GradientMemory, AllGradientsMoveIntoTheBucketsWhereOutputsCantBeSearched) {
  struct Hidden {
    torch::Tensor tensor;
    std::unique_ptr<int> other;
  };
  struct Opaque : Square {
    using Square::Square;
    Hidden forward(const torch::Tensor& x) { return {Square::forward(x), nullptr}; }
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Opaque>(16, 2);
    DistributedDataParallel model(net);
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {16, 16}, step);
      const auto expected = expected_gradients<Square>(net, x);
      net->zero_grad(/*set_to_none=*/false);
      model(x).tensor.square().sum().backward();
      ASSERT_TRUE(has_gradients(net, expected)) << "step " << step;
      if (step >= 1) {
        EXPECT_EQ(number(model, "gradient_bytes_in_place"), number(model, "gradient_bytes")) << step;
      }
    }
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
        ASSERT_TRUE(has_gradients(net, expected)) << "step " << step;
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
      ASSERT_TRUE(has_gradients(net, expected)) << "step " << step;
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

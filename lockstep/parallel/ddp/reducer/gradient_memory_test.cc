// Where gradients lie: written into the buckets by their kernels, never over what the user keeps.
#include <fstream>
#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
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

TEST(GradientMemory, BuffersOfTheUserGetTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool static_graph : {false, true}) {
      auto net = make_double<nn::LinearImpl>(4, 3);
      DistributedDataParallel<nn::LinearImpl> model(net, {.static_graph = static_graph});
      auto flat = torch::zeros({15}, at::kDouble);
      net->weight.mutable_grad() = flat.narrow(0, 0, 12).view({3, 4});
      net->bias.mutable_grad() = flat.narrow(0, 12, 3);
      for (int step = 0; step < 5; ++step) {
        flat.zero_();
        model(torch::full({2, 4}, rank + step, at::kDouble)).sum().backward();
        EXPECT_TRUE(at::equal(flat.narrow(0, 0, 12), torch::full({12}, 1.0 + 2 * step, at::kDouble))) << step;
        EXPECT_TRUE(at::equal(flat.narrow(0, 12, 3), torch::full({3}, 2.0, at::kDouble))) << step;
        EXPECT_EQ(net->weight.grad().data_ptr(), flat.data_ptr()) << step;
      }
    }
  });
}

TEST(GradientMemory, MemoryOfTheUserThatNoOtherTensorShowsGetsTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<nn::LinearImpl>(4, 3);
    DistributedDataParallel<nn::LinearImpl> model(net);
    std::vector<double> memory(12);
    net->weight.mutable_grad() = torch::from_blob(memory.data(), {3, 4}, at::kDouble);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(/*set_to_none=*/false);
      {
        auto guard = model.no_sync();
        model(torch::full({2, 4}, rank + step, at::kDouble)).sum().backward();
      }
      model(torch::full({2, 4}, rank + step, at::kDouble)).sum().backward();
      EXPECT_EQ(memory, std::vector<double>(12, 2.0 + 4 * step)) << step;
      EXPECT_EQ(net->weight.grad().data_ptr(), memory.data()) << step;
    }
    net->weight.mutable_grad().reset();
  });
}

TEST(GradientMemory, WhatAHookOnAParameterKeepsGetsTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 2);
    DistributedDataParallel model(net);
    auto kept = std::make_shared<torch::Tensor>();
    net->layers_[0]->weight.register_hook(
        [kept](const torch::Tensor& gradient) { *kept = gradient.detach(); });
    for (int step = 0; step < 5; ++step) {
      const auto x = data(rank, {8, 8}, step);
      const auto expected = expected_gradients(net, x);
      net->zero_grad();
      model(x).square().sum().backward();
      const auto& gradient = net->layers_[0]->weight.grad();
      ASSERT_TRUE(close(gradient, expected[0])) << step;
      EXPECT_EQ(kept->data_ptr(), gradient.data_ptr()) << step << ": autograd has taken it over";
    }
  });
}

TEST(GradientMemory, HandlesOfGradientsThatAreZeroedInPlaceGetTheAverages) {
  // Over the rebuild before the second step; then one gradient in each step is kept and dropped, so that the
  // bucket moves while the others' handles are known.
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Square>(8, 3);
    DistributedDataParallel model(net, {.bucket_cap_mb = 25});
    auto parameters = net->parameters();
    std::vector<torch::Tensor> handles(parameters.size());
    // From step 3 on each new gradient lies in the bucket; when one is dropped again, the bucket moves.
    for (size_t step = 0; step < 3 + 3 * parameters.size(); ++step) {
      const auto x = data(rank, {8, 8}, static_cast<int>(step));
      const auto expected = expected_gradients(net, x);
      net->zero_grad(/*set_to_none=*/false);
      torch::Tensor kept, values;
      if (step >= 3) {
        const size_t dropped = step % parameters.size();
        kept = std::exchange(handles[dropped], {});
        values = kept.clone();
        parameters[dropped].mutable_grad().reset();
      }
      model(x).square().sum().backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!handles[i].defined()) handles[i] = parameters[i].grad();
        ASSERT_TRUE(close(handles[i], expected[i])) << "step " << step << " parameter " << i;
        ASSERT_EQ(handles[i].data_ptr(), parameters[i].grad().data_ptr())
            << "step " << step << " parameter " << i;
      }
      if (kept.defined()) {
        EXPECT_TRUE(at::equal(kept, values)) << "step " << step;
      }
    }
  });
}

TEST(GradientMemory, AHandleOfASparseGradientGetsTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Embedding net(nn::EmbeddingOptions(4, 3).sparse(true));
    DistributedDataParallel model(net);
    torch::Tensor handle;
    for (int64_t step = 0; step < 3; ++step) {
      if (handle.defined()) handle.zero_();
      model(torch::full({1}, rank + step, at::kLong)).sum().backward();
      if (!handle.defined()) handle = net->weight.grad();
      auto expected = torch::zeros({4, 3});
      expected.narrow(0, step, 2).fill_(0.5);
      EXPECT_TRUE(at::equal(handle.to_dense(), expected)) << step;
      EXPECT_TRUE(handle.is_same(net->weight.grad())) << step;
    }
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
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), 3 * expected[i]))
            << "step " << step << " parameter " << i;
      }
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
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), 2 * expected[i]))
            << "step " << step << " parameter " << i;
      }
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
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(close(net->parameters()[i].grad(), expected[i])) << "step " << step << " parameter " << i;
      }
      if (step >= 1) {
        EXPECT_EQ(number(model, "gradient_bytes_in_place"), number(model, "gradient_bytes")) << step;
      }
    }
  });
}

/// Shared memory that this process has mapped and touched, in MiB; -1 where the system does not tell.
int64_t shared_mebibytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssShmem:", 0) == 0) return std::stoll(line.substr(9)) >> 10;
  }
  return -1;
}

TEST(GradientMemory, ASmallKeptGradientDoesNotHoldItsBucket) {
  if (shared_mebibytes() < 0) GTEST_SKIP() << "/proc/self/status has no RssShmem";
  const auto outcomes = testing::run_ranks_collect(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Square>(512, 4);  // 4 MiB
    DistributedDataParallel model(net, {.bucket_cap_mb = 25});
    std::vector<torch::Tensor> kept;
    const auto train = [&] {
      net->zero_grad();
      model(data(rank, {4, 512}).to(at::kFloat)).sum().backward();
      const auto& gradient = net->layers_[1]->bias.grad();
      kept.push_back(gradient);
      return gradient.clone();
    };
    std::vector<torch::Tensor> values;
    for (int step = 0; step < 3; ++step) values.push_back(train());
    barrier();
    const auto before = shared_mebibytes();
    for (int step = 0; step < 20; ++step) values.push_back(train());
    barrier();
    EXPECT_LT(shared_mebibytes(), before + 20);  // 160 with both ranks' whole buckets
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], values[i])) << "step " << i;
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << outcome.exception.value_or("") << outcome.output;
    const std::string warning = "memory of the gradient of 'layer1.bias' is still in use";
    const auto first = outcome.output.find(warning);
    ASSERT_NE(first, std::string::npos) << outcome.output;
    EXPECT_EQ(outcome.output.find(warning, first + 1), std::string::npos) << "once";
  }
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

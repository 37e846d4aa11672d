// Which parameters a backward uses: unused, repeated and sparse ones, static graphs.
#include <cstdint>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::ddp_graph_test {
namespace {

namespace nn = torch::nn;
using testing::Branching;
using testing::close;
using testing::data;
using ::testing::HasSubstr;
using testing::make_double;
using testing::mean_over_ranks;
using testing::message_of;
using testing::run_ranks;

/// Gradients of Branching, computed apart and averaged; undefined where no rank has one.
std::vector<torch::Tensor> branching_gradients(const Branching& net, const torch::Tensor& x,
                                               bool with_extra) {
  Branching plain;
  plain.to(at::kDouble);
  {
    torch::NoGradGuard no_grad;
    plain.common->weight.copy_(net.common->weight), plain.common->bias.copy_(net.common->bias);
    plain.extra->weight.copy_(net.extra->weight), plain.extra->bias.copy_(net.extra->bias);
  }
  auto [output, hidden] = plain.forward(x, with_extra);
  (output.square().sum() + hidden.sum()).backward();
  std::vector<torch::Tensor> answer;
  for (auto& parameter : {plain.common->weight, plain.common->bias, plain.extra->weight, plain.extra->bias}) {
    auto mine = parameter.grad().defined() ? parameter.grad().clone() : torch::zeros_like(parameter);
    auto any = torch::tensor({parameter.grad().defined() ? 1 : 0});
    all_reduce(mine, ReduceOp::AVG), all_reduce(any, ReduceOp::MAX);
    answer.push_back(any.item<int>() != 0 ? mine : torch::Tensor());
  }
  return answer;
}

void expect_gradients(const Branching& net, const std::vector<torch::Tensor>& expected,
                      const std::string& what) {
  const torch::Tensor parameters[] = {net.common->weight, net.common->bias, net.extra->weight,
                                      net.extra->bias};
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(parameters[i].grad().defined(), expected[i].defined()) << what << " parameter " << i;
    if (expected[i].defined()) {
      ASSERT_TRUE(close(parameters[i].grad(), expected[i])) << what << " parameter " << i;
    }
  }
}

TEST(DdpOptions, FindsUnusedParametersThatDifferByRankAndStep) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool view : {false, true}) {
      auto net = make_double<Branching>();
      DistributedDataParallel model(
          net, {.bucket_cap_mb = 1e-4, .find_unused_parameters = true, .gradient_as_bucket_view = view});
      for (int step = 0; step < 8; ++step) {
        const bool with_extra = ((step >> rank) & 1) != 0;  // no rank in step 0, some, all in step 7
        const auto x = data(rank, {5, 4}, step);
        const auto expected = branching_gradients(*net, x, with_extra);
        net->zero_grad();
        auto [output, hidden] = model(x, with_extra);
        (output.square().sum() + hidden.sum()).backward();
        expect_gradients(*net, expected, "step " + std::to_string(step));
      }
    }
  });
}

TEST(DdpOptions, ParametersThatNoRankUsedKeepTheirGradients) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Branching>();
    DistributedDataParallel model(net, {.find_unused_parameters = true});
    const auto step = [&](bool with_extra) {
      auto [output, hidden] = model(data(rank, {5, 4}), with_extra);
      (output.sum() + hidden.sum()).backward();
    };
    {
      auto guard = model.no_sync();
      step(true);  // each rank its own
    }
    const auto own = net->extra->weight.grad().clone();
    EXPECT_FALSE(close(mean_over_ranks(own), own)) << "the ranks differ";
    step(false);  // it was used since the last reduction, if under no_sync()
    const auto reduced = net->extra->weight.grad().clone();
    EXPECT_TRUE(close(reduced, mean_over_ranks(own)));
    net->extra->weight.mutable_grad().add_(rank);  // to see whether it is reduced
    step(false);
    EXPECT_TRUE(at::equal(net->extra->weight.grad(), reduced + rank)) << "no rank used it";
    step(rank == 0);
    EXPECT_TRUE(close(mean_over_ranks(net->extra->weight.grad()), net->extra->weight.grad()));
  });
}

TEST(DdpOptions, OutputsOutsideOfTheLossLeaveTheirParametersUnused) {
  struct Heads : nn::Module {
    Heads() { register_module("body", body), register_module("a", a), register_module("b", b); }
    std::map<std::string, torch::Tensor> forward(const torch::Tensor& x) {
      const auto y = body(x);
      return {{"a", a(y)}, {"b", b(y)}};
    }
    nn::Linear body{4, 4}, a{4, 2}, b{4, 3};
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Heads>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4, .find_unused_parameters = true});
    for (int step = 0; step < 6; ++step) {
      const bool by_both = step % 3 == 2;  // else b is out of all ranks' losses, or of rank 1's
      const bool with_b = by_both || (step % 3 == 1 && rank == 0);
      const auto x = data(rank, {5, 4}, step);
      const auto loss_of = [&](std::map<std::string, torch::Tensor> output) {
        auto loss = output["a"].square().sum();
        return with_b ? loss + output["b"].sum() : loss;
      };
      auto mine = torch::autograd::grad({loss_of(net->forward(x))}, net->parameters(), {}, {}, false, true);
      net->zero_grad();
      loss_of(model(x)).backward();
      for (size_t i = 0; i < mine.size(); ++i) {
        const auto parameter = net->parameters()[i];
        const auto expected = mean_over_ranks(mine[i].defined() ? mine[i] : torch::zeros_like(parameter));
        const bool unused = step % 3 == 0 && i >= 4;
        ASSERT_EQ(parameter.grad().defined(), !unused) << step << ' ' << i;
        if (!unused) {
          EXPECT_TRUE(close(parameter.grad(), expected, 1e-9)) << step << ' ' << i;
        }
      }
    }
  });
}

TEST(DdpOptions, UnfoundOutputsAreExplained) {
  struct Hidden {  // can't be searched
    torch::Tensor tensor;
    std::unique_ptr<int> other;
  };
  struct Opaque : nn::Module {
    Opaque() { register_module("layer", layer); }
    Hidden forward(const torch::Tensor& x) { return {layer(x), nullptr}; }
    nn::Linear layer{3, 2};
  };
  auto world = init_process_group({.rank = 0, .world_size = 1});
  DistributedDataParallel plain(std::make_shared<Opaque>());
  for (int step = 0; step < 3; ++step) plain(torch::ones({2, 3})).tensor.sum().backward();
  DistributedDataParallel finding(std::make_shared<Opaque>(), {.find_unused_parameters = true});
  EXPECT_THAT(message_of<c10::Error>([&] { finding(torch::ones({2, 3})); }), HasSubstr("visit_tensors"));
}

TEST(DdpOptions, StaticGraphLearnsUnusedAndRepeatedParametersOnce) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Branching>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4, .static_graph = true});
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {5, 4}, step);
      const auto expected = branching_gradients(*net, x, false);
      net->zero_grad();
      auto [output, hidden] = model(x, false);
      (output.square().sum() + hidden.sum()).backward();
      expect_gradients(*net, expected, "step " + std::to_string(step));
    }
    EXPECT_EQ(model.get_ddp_logging_data().ints_map.at("static_graph"), 1);
    const auto text = message_of<c10::Error>([&] {
      auto [output, hidden] = model(data(rank, {5, 4}), true);
      output.sum().backward();
    });
    EXPECT_THAT(text, HasSubstr("Your training graph has changed in this iteration"));
    EXPECT_THAT(text, HasSubstr("extra."));
  });
}

/// Runs a layer inside of a backward of its own, as re-entrant activation checkpointing does.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& /*so that it has a gradient*/, nn::Linear layer) {
    context->saved_data["layer"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(std::move(layer)));
    context->save_for_backward({x});
    torch::NoGradGuard no_grad;
    return static_cast<Holder&>(*context->saved_data["layer"].toCapsule()).layer(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& layer = static_cast<Holder&>(*context->saved_data["layer"].toCapsule()).layer;
    torch::AutoGradMode grad(true);
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    layer(x).backward(gradients[0]);
    return {x.grad(), torch::Tensor(), torch::Tensor()};
  }
  struct Holder : torch::CustomClassHolder {
    explicit Holder(nn::Linear l) : layer(std::move(l)) {}
    nn::Linear layer;
  };
};

struct Reentrant : nn::Module {
  Reentrant() {
    register_module("first", first), register_module("shared", shared), register_module("last", last);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = first(x);
    for (int i = 0; i < times; ++i) y = torch::tanh(Checkpointed::apply(y, shared->weight.detach(), shared));
    return last(y);
  }
  nn::Linear first{4, 4}, shared{4, 4}, last{4, 2};
  int times = 3;
};

TEST(DdpOptions, ReentrantBackwardNeedsStaticGraphOnlyWhenALayerIsRepeated) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const int times : {1, 3}) {
      auto net = make_double<Reentrant>();
      net->times = times;
      DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4, .static_graph = times > 1});
      for (int step = 0; step < 4; ++step) {
        const auto x = data(rank, {5, 4}, step);
        auto y = net->first(x);
        for (int i = 0; i < times; ++i) y = torch::tanh(net->shared(y));
        const auto expected = torch::autograd::grad(
            {net->last(y).square().sum()}, {net->first->weight, net->shared->weight, net->last->weight});
        net->zero_grad(/*set_to_none=*/step < 2);
        model(x).square().sum().backward();
        EXPECT_TRUE(close(net->first->weight.grad(), mean_over_ranks(expected[0]))) << times << ' ' << step;
        EXPECT_TRUE(close(net->shared->weight.grad(), mean_over_ranks(expected[1]))) << times << ' ' << step;
        EXPECT_TRUE(close(net->last->weight.grad(), mean_over_ranks(expected[2]))) << times << ' ' << step;
      }
      const auto numbers = model.get_ddp_logging_data().ints_map;
      EXPECT_EQ(numbers.at("gradient_bytes_in_place"), numbers.at("gradient_bytes"))
          << "of nested passes, too, once they are in the bucket";
    }
    auto net = make_double<Reentrant>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4});
    const auto text = message_of<c10::Error>([&] { model(data(rank, {5, 4})).sum().backward(); });
    EXPECT_THAT(text, HasSubstr("Expected to mark a variable ready only once"));
    EXPECT_THAT(text, HasSubstr("'shared."));
  });
}

TEST(DdpOptions, SparseGradientsAlsoOfUnusedEmbeddings) {
  struct Words : nn::Module {
    Words() { register_module("words", words), register_module("other", other), register_module("out", out); }
    torch::Tensor forward(const torch::Tensor& tokens, bool both) {
      auto x = words(tokens);
      return out(both ? x + other(tokens) : x).sum();
    }
    nn::Embedding words{nn::EmbeddingOptions(10, 3).sparse(true)},
        other{nn::EmbeddingOptions(10, 3).sparse(true)};
    nn::Linear out{3, 1};
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Words>();
    DistributedDataParallel model(net, {.find_unused_parameters = true});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      const bool both = (step + rank) % 2 == 0;
      const auto tokens = torch::tensor({step, 2 * rank, 5, 5});
      auto plain = make_double<Words>();
      {
        torch::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); ++i)
          plain->parameters()[i].copy_(net->parameters()[i]);
      }
      plain->forward(tokens, both).backward();
      optimizer.zero_grad();
      model(tokens, both).backward();
      ASSERT_TRUE(net->words->weight.grad().is_sparse());
      const auto dense = [](const nn::Embedding& embedding) {
        return embedding->weight.grad().defined() ? embedding->weight.grad().to_dense()
                                                  : torch::zeros({10, 3}, at::kDouble);
      };
      EXPECT_TRUE(close(dense(net->words), mean_over_ranks(dense(plain->words)))) << step;
      EXPECT_TRUE(close(dense(net->other), mean_over_ranks(dense(plain->other)))) << step;
      optimizer.step();
    }
  });
}

TEST(DdpOptions, SkipsBucketsThatNoRankUses) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Branching>();
    DistributedDataParallel model(
        net, {.bucket_cap_mb = 1e-5, .find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    const auto operations = [] { return default_group()->getBackend(at::kCPU)->getSequenceNumberForGroup(); };
    std::vector<uint64_t> used;
    for (const bool with_extra : {true, false}) {
      const auto x = data(rank, {5, 4});
      const auto expected = branching_gradients(*net, x, with_extra);
      net->zero_grad();
      const auto before = operations();
      auto [output, hidden] = model(x, with_extra);
      (output.square().sum() + hidden.sum()).backward();
      used.push_back(operations() - before);
      expect_gradients(*net, expected, with_extra ? "with" : "without");
    }
    EXPECT_EQ(used[0], used[1] + 2) << "extra's weight and bias";
  });
}

/// Blocks of which one is used twice, with or without activation checkpoints.
struct Blocks : nn::Module {
  explicit Blocks(bool with_checkpoints) : checkpointed(with_checkpoints) {
    register_module("first", first), register_module("second", second);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto block = [](nn::Linear& layer, const torch::Tensor& input) {
      return layer(input).tanh().exp();
    };
    for (nn::Linear* layer : {&first, &second, &first}) {
      x = checkpointed ? activation_checkpoint({}, block, *layer, x) : block(*layer, x);
    }
    return x;
  }
  bool checkpointed;
  nn::Linear first{4, 4};
  nn::Linear second{4, 4};
};

// A checkpoint's graph is the same as without it, so no option is needed, though a layer is used twice.
TEST(DdpOptions, ActivationCheckpointsChangeNoGradient) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto plain = make_double<Blocks>(false);
    auto net = make_double<Blocks>(true);
    DistributedDataParallel reference(plain), model(net);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 4; ++i) net->parameters()[i].copy_(plain->parameters()[i]);
    }
    for (int step = 0; step < 3; ++step) {
      plain->zero_grad(), net->zero_grad();
      reference(data(rank, {3, 4}, step)).square().sum().backward();
      model(data(rank, {3, 4}, step)).square().sum().backward();
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(at::equal(net->parameters()[i].grad(), plain->parameters()[i].grad()))
            << step << ' ' << i;
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::ddp_graph_test

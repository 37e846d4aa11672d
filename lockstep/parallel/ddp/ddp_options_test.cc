// DistributedDataParallel's options, one by one. Their numbers are compared with PyTorch's in parity/.
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::ddp_options_test {
namespace {

namespace nn = torch::nn;
using testing::Branching;
using testing::close;
using testing::data;
using testing::gradients;
using ::testing::HasSubstr;
using testing::make_double;
using testing::mean_over_ranks;
using testing::Net;
using ::testing::Not;
using testing::run_ranks;

std::string message_of(const std::function<void()>& action) {
  return testing::message_of<c10::Error>(action);
}

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

TEST(DdpOptions, ParametersThatNobodyUsedKeepTheirGradients) {
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
    EXPECT_TRUE(at::equal(net->extra->weight.grad(), reduced + rank)) << "nobody used it";
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
        const bool nobody = step % 3 == 0 && i >= 4;
        ASSERT_EQ(parameter.grad().defined(), !nobody) << step << ' ' << i;
        if (!nobody) {
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
  EXPECT_THAT(message_of([&] { finding(torch::ones({2, 3})); }), HasSubstr("visit_tensors"));
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
    const auto text = message_of([&] {
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
    const auto text = message_of([&] { model(data(rank, {5, 4})).sum().backward(); });
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

TEST(DdpOptions, IgnoredParametersAndBuffersAreLeftAlone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    auto net = make_double<Net>();
    DistributedDataParallel model(net, {.parameters_to_ignore = {"first.weight", "norm.running_mean"}});
    const auto equal_everywhere = [](const torch::Tensor& tensor) {
      return close(mean_over_ranks(tensor), tensor);
    };
    EXPECT_FALSE(equal_everywhere(net->first->weight));
    EXPECT_TRUE(equal_everywhere(net->last->weight));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(data(rank, {5, 6}, step)).square().sum().backward();
      EXPECT_FALSE(equal_everywhere(net->first->weight.grad()));
      EXPECT_TRUE(equal_everywhere(net->last->weight.grad()));
    }
    model(data(rank, {5, 6}));
    EXPECT_FALSE(equal_everywhere(net->norm->running_mean));
  });
}

TEST(DdpOptions, DelayedParametersAreReducedTogether) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool all : {false, true}) {
      auto net = make_double<Net>();
      DistributedDataParallelOptions options{.param_to_hook_all_reduce = net->first->weight};
      for (const auto& item : net->named_parameters()) {
        if (all || item.key().starts_with("last"))
          options.delay_all_reduce_named_params.emplace_back(item.key(), item.value());
      }
      if (all) options.param_to_hook_all_reduce = net->first->bias;
      DistributedDataParallel model(net, options);
      for (int step = 0; step < 3; ++step) {
        const auto x = data(rank, {5, 6}, step);
        const auto expected = torch::autograd::grad({net->forward(x).square().sum()}, net->parameters());
        net->zero_grad(step == 1);
        model(x).square().sum().backward();
        EXPECT_TRUE(close(net->last->weight.grad(), mean_over_ranks(expected[4]), 1e-9))
            << all << ' ' << step;
        if (!all) {
          EXPECT_TRUE(close(net->first->weight.grad(), mean_over_ranks(expected[0]), 1e-9)) << step;
        }
      }
    }
  });
}

TEST(DdpOptions, DelayedParametersHaveNamesOfTheModule) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    nn::Linear linear(2, 2);
    const auto text = testing::message_of<c10::ValueError>([&] {
      DistributedDataParallel model(linear, {.parameters_to_ignore = {"weight", "bias"},
                                             .delay_all_reduce_named_params = {{"wait", linear->weight}},
                                             .param_to_hook_all_reduce = linear->bias});
    });
    EXPECT_THAT(text, HasSubstr("delay_all_reduce_named_params (wait)"));
    EXPECT_THAT(text, HasSubstr("named_parameters(): weight, bias"));
  });
}

TEST(DdpOptions, MixedPrecisionComputesInOneTypeAndTrainsInAnother) {
  struct Probe : nn::Module {
    Probe() {
      register_module("layer", layer), register_buffer("offset", offset), register_buffer("count", count);
    }
    torch::Tensor forward(const torch::Tensor& x, const std::vector<torch::Tensor>& more) {
      seen = {x.scalar_type(), more[0].scalar_type(), more[1].scalar_type(), layer->weight.scalar_type(),
              offset.scalar_type()};
      return torch::matmul(x, square).mul(square[0]).narrow(1, 0, 4) * 0 + layer(x) + offset;
    }
    torch::Tensor square = register_parameter("square", torch::ones({8, 8}));  // autograd saves it as it is
    nn::Linear layer{8, 4};
    torch::Tensor offset = torch::ones({4}), count = torch::zeros({1}, at::kLong);
    std::vector<at::ScalarType> seen;
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Probe>();
    DistributedDataParallel model(net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16,
                                                                          .buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(net->count.scalar_type(), at::kLong);
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {6, 8}, step).to(at::kFloat);
      net->zero_grad();
      std::vector<torch::Tensor> more{x, torch::ones({2}, at::kLong)};
      if (step == 2) {
        auto guard = model.no_sync();
        model(x, more).sum().backward();
        EXPECT_EQ(net->layer->weight.grad().scalar_type(), at::kFloat);
        net->zero_grad();
      }
      auto output = model(x, more);
      EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kLong,
                                                        at::kBFloat16, at::kBFloat16}));
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->layer->weight.scalar_type(), at::kBFloat16) << "until the end of backward";
      EXPECT_EQ(more[0].scalar_type(), at::kFloat) << "the caller's own";
      output.sum().backward();
      EXPECT_EQ(net->layer->weight.scalar_type(), at::kFloat);
      {
        torch::NoGradGuard no_grad;
        model(x, more);
      }
      EXPECT_EQ(net->layer->weight.scalar_type(), at::kFloat) << "no backward will restore it";
      const auto& gradient = net->layer->weight.grad();
      ASSERT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(gradient, gradient.to(at::kBFloat16).to(at::kFloat)))
          << "it was reduced in bfloat16";
      const auto expected = mean_over_ranks(x.sum(0).expand({4, 8}));
      EXPECT_TRUE(at::allclose(gradient, expected, 0.05, 0.05)) << step;
    }
  });
}

TEST(DdpOptions, MixedPrecisionTakesSeveralForwardsBeforeOneBackward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear net(1, 1);
    DistributedDataParallel model(net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      if (step % 2 == 1) model(torch::ones({1, 1}));  // without a backward
      auto loss = model(torch::full({1, 1}, rank + 1.0)).sum() + model(torch::full({1, 1}, 2.0)).sum();
      {
        torch::NoGradGuard no_grad;  // neither this forward nor one that throws ends what backward needs
        model(torch::ones({1, 1}));
        EXPECT_THROW(model(torch::ones({1, 3})), c10::Error);
      }
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16) << step;
      loss.backward();
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat) << step;
      EXPECT_EQ(net->weight.grad().item<float>(), 3.5) << step;
      EXPECT_EQ(net->bias.grad().item<float>(), 2) << step;
    }
  });
}

TEST(DdpOptions, AHookReplacesTheReduction) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4});
    std::vector<size_t> seen;
    const auto hook = [&seen](const ProcessGroup& group, GradBucket& bucket) {
      seen.push_back(bucket.index());
      EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
      int64_t numel = 0;
      for (size_t i = 0; i < bucket.gradients().size(); ++i) {
        EXPECT_EQ(bucket.gradients()[i].sizes(), bucket.parameters()[i].sizes());
        numel += bucket.gradients()[i].numel();
      }
      EXPECT_EQ(bucket.buffer().numel(), numel);
      auto sum = bucket.buffer().clone();
      std::vector<at::Tensor> tensors{sum};
      return then((group ? group : default_group())->allreduce(tensors)->getFuture(),
                  [](const at::Tensor& reduced) { return reduced * 3; });
    };
    model.register_comm_hook(ProcessGroup(), hook, "three times");
    EXPECT_THAT(message_of([&] { model.register_comm_hook(ProcessGroup(), hook); }),
                HasSubstr("only be called once"));
    for (int step = 0; step < 3; ++step) {
      const auto x = data(rank, {5, 6}, step);
      const auto expected = torch::autograd::grad({net->forward(x).square().sum()}, net->parameters());
      net->zero_grad();
      seen.clear();
      model(x).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(close(net->parameters()[i].grad(), mean_over_ranks(expected[i]) * 6, 1e-9))
            << step << ' ' << i;
      }
      ASSERT_EQ(seen.size(), model.reducer().bucket_bytes().size());
      for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i);
    }
    EXPECT_EQ(model.get_ddp_logging_data().strs_map.at("comm_hook"), "three times");
    DistributedDataParallel other(make_double<Net>());
    other.register_comm_hook(nullptr,
                             [](std::nullptr_t, GradBucket&) { return completed_future(torch::ones({1})); });
    EXPECT_THAT(message_of([&] {
                  other(data(rank, {5, 6})).sum().backward();
                }),
                HasSubstr("1 elements for a bucket"));
  });
}

TEST(DdpOptions, AFusedOptimizerStepsInBackward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(2);
    auto net = make_double<Net>(), plain = make_double<Net>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4}), reference(plain);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i)
        plain->parameters()[i].copy_(net->parameters()[i]);
    }
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    model.register_fused_optim([&](std::vector<at::Tensor> parameters) {
      return std::make_shared<torch::optim::SGD>(parameters, options);
    });
    torch::optim::SGD optimizer(plain->parameters(), options);
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {5, 6}, step);
      net->zero_grad();
      model(x).square().sum().backward();
      optimizer.zero_grad();
      reference(x).square().sum().backward();
      optimizer.step();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(close(net->parameters()[i], plain->parameters()[i], 1e-9)) << step << ' ' << i;
      }
    }
  });
}

TEST(DdpOptions, ABufferHookReplacesTheBroadcast) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallel model(net);
    model.register_buffer_comm_hook([](const std::vector<NamedTensor>& buffers) {
      std::vector<HookFuture> futures;
      for (const auto& [name, buffer] : buffers) {
        if (!buffer.is_floating_point()) continue;
        std::vector<at::Tensor> tensors{buffer};
        c10d::AllreduceOptions options;
        options.reduceOp = c10d::ReduceOp::AVG;
        at::Tensor(buffer).mul_(1);  // in place: the graph that saved it must not mind
        futures.push_back(default_group()->allreduce(tensors, options)->getFuture());
      }
      return futures;
    });
    for (int step = 0; step < 3; ++step) {
      model(data(rank, {5, 6}, step)).sum().backward();
      EXPECT_TRUE(close(mean_over_ranks(net->norm->running_mean), net->norm->running_mean))
          << "after backward";
    }
    EXPECT_TRUE(model.will_sync_module_buffers());
  });
}

TEST(DdpOptions, LoggingDataTellWhatWasDone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallel model(net, {.bucket_cap_mb_list = {1e-4, 1}});
    for (int step = 0; step < 3; ++step) model(data(rank, {5, 6}, step)).sum().backward();
    const auto logged = model.get_ddp_logging_data();
    EXPECT_EQ(logged.ints_map.at("iteration"), 3);
    EXPECT_EQ(logged.ints_map.at("world_size"), 2);
    EXPECT_EQ(logged.ints_map.at("rank"), rank);
    EXPECT_EQ(logged.ints_map.at("num_parameter_tensors"), 6);
    EXPECT_EQ(logged.ints_map.at("total_parameter_size_bytes"), (30 + 5 + 5 + 5 + 10 + 2) * 8);
    EXPECT_EQ(logged.ints_map.at("has_rebuilt_buckets"), 1);
    EXPECT_EQ(logged.ints_map.at("num_buckets_reduced"), 2);
    EXPECT_EQ(logged.ints_map.at("can_set_static_graph"), 1);
    EXPECT_EQ(logged.ints_map.at("tuned"), 0);
    EXPECT_EQ(logged.ints_map.at("has_error"), 0);
    EXPECT_EQ(logged.strs_map.at("dtypes"), "Double");
    EXPECT_EQ(logged.strs_map.at("backend_name"), "lockstep");
    EXPECT_EQ(logged.strs_map.at("bucket_sizes"), "136, 320");
    for (const char* time : {"forward_compute_time", "backward_compute_time", "backward_comm_time"}) {
      EXPECT_GT(logged.ints_map.at(time), 0) << time;
      EXPECT_GT(logged.ints_map.at(std::string("avg_") + time), 0) << time;
    }
    EXPECT_THROW(model.set_ddp_runtime_logging_sample_rate(0), c10::ValueError);
    model.check_reducer_finalized();
  });
}

TEST(DdpOptions, ResultsDoNotDependOnTunedSizes) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    std::vector<torch::Tensor> first;
    for (const size_t cap : {size_t{0}, size_t{1}, size_t{100}, size_t{300}, size_t{1} << 30}) {
      torch::manual_seed(3);
      auto net = std::make_shared<Net>();
      DistributedDataParallel model(net);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      for (int step = 0; step < 20; ++step) {
        if (step == 5 && cap > 0) model.reducer().force_caps({cap, cap});
        optimizer.zero_grad();
        model(data(rank, {5, 6}, step).to(at::kFloat)).square().sum().backward();
        optimizer.step();
      }
      const auto logged = model.get_ddp_logging_data().ints_map;
      EXPECT_EQ(logged.at("tuned"), 1) << "by itself or by force";
      if (cap == 1) {
        EXPECT_EQ(logged.at("num_buckets_reduced"), 6);
      }
      if (first.empty()) {
        for (const auto& parameter : net->parameters()) first.push_back(parameter.detach().clone());
      }
      for (size_t i = 0; i < first.size(); ++i)
        EXPECT_TRUE(at::equal(net->parameters()[i], first[i])) << cap << ' ' << i;
    }
  });
}

TEST(DdpOptions, SkipsBucketsThatNobodyUses) {
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

TEST(DdpOptions, SkippingBucketsIsRefusedInsideAJoin) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  DistributedDataParallel model(make_double<Branching>(),
                                {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { auto join = model.join(); }),
              HasSubstr("skip_all_reduce_unused_params does not go together with join()"));
  auto disabled = model.join({.enable = false});
}

TEST(DdpOptions, UnevenInputsInsideJoin) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool by_initial : {true, false}) {
      auto net = make_double<Net>();
      DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4});
      const int batches = 2 + 2 * rank;
      {
        auto join = model.join({.divide_by_initial_world_size = by_initial});
        for (int step = 0; step < batches; ++step) {
          int64_t training = 0;
          for (int other = 0; other < 3; ++other) training += step < 2 + 2 * other ? 1 : 0;
          const auto x = data(7, {5, 6}, step);  // the same on all ranks that still train
          net->zero_grad();
          auto output = model(x);
          const auto expected = torch::autograd::grad({output.square().sum()}, {net->last->weight}, {}, true);
          output.square().sum().backward();
          const double share = by_initial ? static_cast<double>(training) / 3 : 1.0;
          EXPECT_TRUE(close(net->last->weight.grad(), expected[0] * share, 1e-9))
              << by_initial << ' ' << step;
          torch::NoGradGuard no_grad;
          for (auto& parameter : net->parameters()) parameter.sub_(0.1 * parameter.grad());
        }
      }
      for (const auto& parameter : net->parameters()) {
        EXPECT_TRUE(close(mean_over_ranks(parameter), parameter)) << "the last joiner's model is everywhere";
      }
      EXPECT_TRUE(close(mean_over_ranks(net->norm->running_mean), net->norm->running_mean));
    }
    DistributedDataParallel model(make_double<Net>());
    const auto text = message_of([&] {
      auto join = model.join({.throw_on_early_termination = true});
      for (int step = 0; step < 2 + rank; ++step) model(data(rank, {5, 6})).sum().backward();
      join.finish();
    });
    EXPECT_THAT(text, HasSubstr("exhausted"));
  });
}

TEST(DdpOptions, AStaticGraphIsLearnedInAJoinWithoutInputs) {
  struct Twice : nn::Module {
    Twice() { register_module("used", used), register_module("unused", unused); }
    torch::Tensor forward(const torch::Tensor& x) { return used(x) + used(2 * x); }
    nn::Linear used{1, 1}, unused{1, 1};
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Twice>();
    DistributedDataParallel<Twice> model(net, {.static_graph = true});
    for (int epoch = 0; epoch < 3; ++epoch) {
      const int batches = rank == 0 && epoch == 0 ? 0 : 2;
      auto join = model.join();
      for (int step = 0; step < batches; ++step) {
        net->zero_grad();
        model(torch::ones({1, 1})).sum().backward();
        const float training = epoch == 0 ? 1 : 2;
        EXPECT_EQ(net->used->weight.grad().item<float>(), 3 * training / 2) << epoch << ' ' << step;
        EXPECT_EQ(net->used->bias.grad().item<float>(), 2 * training / 2) << epoch << ' ' << step;
        EXPECT_FALSE(net->unused->weight.grad().defined()) << epoch << ' ' << step;
      }
      join.finish();
      net->zero_grad();
    }
  });
}

TEST(DdpOptions, AllModelsOfAJoinDivideByTheRanksThatTrain) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear first(1, 1), second(1, 1);
    DistributedDataParallel a(first), b(second);
    {
      Join join({&a, &b}, {.divide_by_initial_world_size = false});
      for (int step = 0; step < 2 + 2 * rank; ++step) {
        for (auto* model : {&a, &b}) {
          model->zero_grad();
          (*model)(torch::ones({1, 1})).sum().backward();
        }
        EXPECT_EQ(first->bias.grad().item<float>(), 1) << step;
        EXPECT_EQ(second->bias.grad().item<float>(), 1) << step;
      }
    }
    EXPECT_EQ(first->bias.grad().item<float>(), 1) << "the last shadowed step's";
    EXPECT_EQ(second->bias.grad().item<float>(), 1) << "the last shadowed step's";
    a.zero_grad();
    a(torch::ones({1, 1}) * (2 + 2 * rank)).sum().backward();
    EXPECT_EQ(first->weight.grad().item<float>(), 3) << "behind the Join by all ranks again";
  });
}

TEST(DdpOptions, WhatTorchSaveWritesIsThePlainModules) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  auto net = make_double<Net>();
  auto model = std::make_shared<DistributedDataParallel<Net>>(net);
  (*model)(data(0, {5, 6})).sum().backward();
  std::stringstream stream;
  torch::save(model, stream);
  auto plain = make_double<Net>();
  torch::load(plain, stream);
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(plain->parameters()[i], net->parameters()[i]));
  }
  EXPECT_TRUE(at::equal(plain->norm->running_mean, net->norm->running_mean));
  EXPECT_THAT(model->named_parameters().keys(), ::testing::Contains("module.first.weight"));
}

TEST(DdpOptions, WrapsWhatLibTorchUsersHave) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    const auto x = data(rank, {5, 6}).to(at::kFloat);
    nn::Sequential sequential(nn::Linear(6, 4), nn::ReLU(), nn::Linear(4, 2));
    DistributedDataParallel in_sequence(sequential);
    in_sequence(x).sum().backward();
    nn::Linear linear(6, 2);
    DistributedDataParallel held(linear);
    held(x).sum().backward();
    nn::AnyModule any(nn::Linear(6, 2));
    DistributedDataParallel erased(any);
    erased(x).sum().backward();
    torch::jit::Module script("script");
    script.register_parameter("weight", torch::randn({6, 2}).requires_grad_(), false);
    script.define("def forward(self, x):\n  return x.matmul(self.weight)\n");
    DistributedDataParallel scripted(script);
    scripted(x).toTensor().sum().backward();
    const auto equal_everywhere = [](const torch::Tensor& tensor) {
      return close(mean_over_ranks(tensor), tensor, 1e-6);
    };
    for (const auto& parameter : {sequential->parameters()[0], linear->weight, any.ptr()->parameters()[0],
                                  script.attr("weight").toTensor()}) {
      EXPECT_TRUE(equal_everywhere(parameter));
      EXPECT_TRUE(equal_everywhere(parameter.grad()));
    }
  });
}

}  // namespace
}  // namespace lockstep::ddp_options_test

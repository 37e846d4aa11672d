#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/optim/swa_utils.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// The numbers are compared with Python's in averaged_model_test.py; here are modules of all kinds, and
// errors.
namespace lockstep::swa_utils::averaged_model_test {
namespace {

namespace nn = torch::nn;
using lockstep::testing::message_of;
using lockstep::testing::run_ranks;
using ::testing::HasSubstr;

/// As most write theirs: without clone(). Weights that no seed gives twice.
struct Net : nn::Module {
  explicit Net(int64_t outputs = 3) : last(register_module("last", nn::Linear(4, outputs))) {
    register_module("first", first);
    register_module("norm", norm);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(first(x))); }
  nn::Linear first{2, 4};
  nn::BatchNorm1d norm{4};
  nn::Linear last;
};

void fill(nn::Module& module, double value) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.fill_(value);
}

bool all_equal(const nn::Module& module, double value) {
  for (const auto& parameter : module.parameters()) {
    if (!parameter.eq(value).all().item<bool>()) return false;
  }
  return true;
}

TEST(AveragedModel, CopiesAModuleWithoutCloneByAFactory) {
  auto net = std::make_shared<Net>();
  net->eval();
  AveragedModel average(net, {}, [] { return std::make_shared<Net>(); });
  const auto x = torch::randn({5, 2});
  EXPECT_TRUE(at::equal(average(x), net->forward(x)));
  EXPECT_FALSE(average.module->is_training());
  EXPECT_FALSE(average.module->parameters()[0].is_same(net->parameters()[0]));
  fill(*net, 1);
  EXPECT_FALSE(all_equal(*average.module, 1));
  average.update_parameters(*net);
  EXPECT_TRUE(all_equal(*average.module, 1));
  fill(*net, 4);
  average.update_parameters(*net);
  average.update_parameters(*net);
  EXPECT_TRUE(all_equal(*average.module, 3));
  EXPECT_EQ(average.n_averaged.item<int64_t>(), 3);
}

TEST(AveragedModel, CopiesWhateverTheWrappersTake) {
  const auto x = torch::randn({5, 2});
  nn::Linear linear(2, 3);
  EXPECT_TRUE(at::equal(AveragedModel(linear)(x), linear(x)));
  EXPECT_TRUE(at::equal(AveragedModel(linear.ptr())(x), linear(x)));
  nn::Sequential sequential(linear, nn::ReLU());
  EXPECT_TRUE(at::equal(AveragedModel(sequential)(x), sequential->forward(x)));
  // A module without clone() in one that has it: LibTorch's clone() leaves its weights to chance.
  struct Outer : nn::Cloneable<Outer> {
    Outer() { reset(); }
    void reset() override { inner = register_module("inner", std::make_shared<Net>()); }
    torch::Tensor forward(const torch::Tensor& x) { return inner->forward(x); }
    std::shared_ptr<Net> inner;
  };
  auto outer = std::make_shared<Outer>();
  outer->eval();
  EXPECT_TRUE(at::equal(AveragedModel(outer)(x), outer->forward(x)));
  nn::AnyModule any(linear);
  AveragedModel of_any(any);
  EXPECT_TRUE(at::equal(of_any(x), linear(x)));
  fill(*linear, 2);
  of_any.update_parameters(any);
  EXPECT_TRUE(all_equal(*of_any.module.ptr(), 2));

  torch::jit::Module script("script");
  script.register_parameter("weight", torch::full({2}, 3.0), /*is_buffer=*/false);
  script.define("def forward(self, x):\n    return x * self.weight\n");
  AveragedModel of_script(script);
  (*script.parameters().begin()).detach().fill_(5);
  EXPECT_TRUE(at::equal(of_script(x).toTensor(), x * 3));
  of_script.update_parameters(script);
  EXPECT_TRUE(at::equal(of_script(x).toTensor(), x * 5));
}

TEST(AveragedModel, AveragesATensorWithTwoNamesOnce) {
  struct Tied : nn::Module {
    Tied() {
      register_parameter("one", weight);
      register_parameter("two", weight);
    }
    torch::Tensor weight = torch::zeros({3});
  };
  auto net = std::make_shared<Tied>();
  AveragedModel<Tied> average(net, {.multi_avg_fn = get_ema_multi_avg_fn(0.5)},
                              [] { return std::make_shared<Tied>(); });
  average.update_parameters(*net);
  fill(*net, 1);
  average.update_parameters(*net);
  EXPECT_TRUE(all_equal(*average.module, 0.5));
}

TEST(AveragedModel, IsSavedAndLoaded) {
  const auto factory = [] { return std::make_shared<Net>(); };
  auto net = factory();
  AveragedModel<Net> average(net, {.multi_avg_fn = get_ema_multi_avg_fn(0.9)}, factory);
  for (int value = 0; value < 3; ++value) {
    fill(*net, value);
    average.update_parameters(*net);
  }
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  average.save(out);
  out.save_to(stream);
  AveragedModel<Net> loaded(factory(), {.multi_avg_fn = get_ema_multi_avg_fn(0.9)}, factory);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  loaded.load(in);
  EXPECT_EQ(loaded.n_averaged.item<int64_t>(), 3);
  fill(*net, 7);
  average.update_parameters(*net);
  loaded.update_parameters(*net);
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(loaded.parameters()[i], average.parameters()[i]));
  }
  EXPECT_EQ(loaded.n_averaged.item<int64_t>(), 4);
}

TEST(AveragedModel, RefusesWhatDoesNotFit) {
  auto net = std::make_shared<Net>();
  const auto factory = [] { return std::make_shared<Net>(); };
  EXPECT_THAT(message_of<c10::Error>([&] { AveragedModel<Net> average(net); }), HasSubstr("clone"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                AveragedModel<Net>(net, {.avg_fn = get_swa_avg_fn(), .multi_avg_fn = get_swa_multi_avg_fn()},
                                   factory);
              }),
              HasSubstr("Only one of avg_fn and multi_avg_fn"));
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { AveragedModel<Net>(net, {}, [] { return std::make_shared<Net>(2); }); }),
              HasSubstr("no 'last.weight' of sizes [3, 4]"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { AveragedModel<Net>(net, {}, [] { return nullptr; }); }),
              HasSubstr("made no module"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { AveragedModel<Net> average(nullptr); }),
              HasSubstr("is empty"));
  AveragedModel<Net> average(net, {}, factory);
  EXPECT_THAT(message_of<c10::ValueError>([&] { average.update_parameters(*nn::Linear(2, 4)); }),
              HasSubstr("the model has 2 parameters, the average 6"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { average.update_parameters(Net(2)); }),
              HasSubstr("has sizes [2, 4]"));
  EXPECT_EQ(average.n_averaged.item<int64_t>(), 0);
  for (const double decay : {-0.1, 1.1}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { get_ema_avg_fn(decay); }),
                HasSubstr("Invalid decay value"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { get_ema_multi_avg_fn(decay); }),
                HasSubstr("Invalid decay value"));
  }
}

TEST(AveragedModel, IsTheSameOnAllRanksOfDistributedDataParallel) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Net>();
    DistributedDataParallel model(net);
    AveragedModel average(model.module, {.multi_avg_fn = get_ema_multi_avg_fn(0.7)},
                          [] { return std::make_shared<Net>(); });
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const auto first = model.parameters()[0].detach().clone();
    torch::Tensor expected;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model(torch::randn({6, 2}) + rank).square().sum().backward();
      optimizer.step();
      average.update_parameters(model);  // the wrapper has the same parameters
      const auto weight = model.parameters()[0].detach();
      expected = step == 0 ? weight.clone() : expected.lerp(weight, 1 - 0.7);
    }
    const auto actual = average.module->parameters()[0].detach();
    // The first parameter of the wrapper is the module's first, too.
    EXPECT_TRUE(at::allclose(actual, expected));
    EXPECT_FALSE(at::equal(actual, first));
    auto others = actual.clone();
    broadcast(others, 0);
    EXPECT_TRUE(at::equal(others, actual));
  });
}

TEST(UpdateBn, TakesTheMeanOfAllBatches) {
  auto net = std::make_shared<Net>();
  net->norm->options.momentum(0.3);
  net->eval();
  std::vector<std::pair<torch::Tensor, torch::Tensor>> loader;
  torch::Tensor mean = torch::zeros({4});
  for (int batch = 0; batch < 3; ++batch) {
    const auto x = torch::randn({8, 2});
    loader.emplace_back(x, torch::zeros({8}));
    mean += net->first(x).mean(0).detach() / 3;
  }
  update_bn(loader, *net);
  EXPECT_TRUE(at::allclose(net->norm->running_mean, mean, 1e-5, 1e-6));
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 3);
  EXPECT_EQ(net->norm->options.momentum(), 0.3);
  EXPECT_FALSE(net->is_training());
  EXPECT_FALSE(net->norm->is_training());
}

TEST(UpdateBn, ALayerWithTwoNamesKeepsItsMomentum) {
  struct Twice : Net {
    Twice() { register_module("again", norm); }
  };
  auto net = std::make_shared<Twice>();
  std::vector<std::pair<torch::Tensor, torch::Tensor>> loader = {{torch::randn({8, 2}), torch::zeros({8})}};
  update_bn(loader, *net);
  EXPECT_EQ(net->norm->options.momentum(), 0.1);
}

TEST(UpdateBn, TakesExamplesHoldersAndSynchronisedNorms) {
  struct Example {
    torch::Tensor data, target;
  };
  nn::Sequential net(nn::Conv2d(1, 2, 3), SyncBatchNorm(2), nn::ReLU());
  const std::vector<Example> loader = {{torch::randn({4, 1, 8, 8}), {}}};
  update_bn(loader, net);
  const auto norm = net->ptr<SyncBatchNormImpl>(1);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  const auto wanted = net->ptr<nn::Conv2dImpl>(0)->forward(loader[0].data).mean({0, 2, 3});
  EXPECT_TRUE(at::allclose(norm->running_mean, wanted, 1e-4, 1e-5));
  EXPECT_TRUE(net->is_training());
}

TEST(UpdateBn, LeavesModelsWithoutBatchNormAloneAndRestoresAfterErrors) {
  nn::Linear linear(2, 2);
  linear->eval();
  const std::vector<torch::Tensor> bad = {torch::randn({3, 5})};
  update_bn(bad, linear);  // no batch goes through it
  auto net = std::make_shared<Net>();
  net->eval();
  EXPECT_THROW(update_bn(bad, *net), c10::Error);
  EXPECT_FALSE(net->is_training());
  EXPECT_EQ(net->norm->options.momentum(), 0.1);
}

}  // namespace
}  // namespace lockstep::swa_utils::averaged_model_test

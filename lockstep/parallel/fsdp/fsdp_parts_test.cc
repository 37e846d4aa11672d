// FullyShardedDataParallel as members of a module that is wrapped itself.
#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_parts_test {
namespace {

using fsdp::ShardingStrategy;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = FullyShardedDataParallelOptions;

/// Sizes that no number of ranks divides, a frozen parameter and a buffer.
struct Block : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(5, 7));
  nn::Linear down = register_module("down", nn::Linear(7, 5));
  torch::Tensor scale = register_parameter("scale", torch::full({5}, 0.5), /*requires_grad=*/false);
  torch::Tensor count = register_buffer("count", torch::zeros({}));
  torch::Tensor forward(const torch::Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      count.add_(1);
    }
    return x + torch::tanh(down(torch::tanh(up(x)))) * scale;
  }
};

/// What is wrapped with these options, or left as it is.
template <class Module>
struct MakePart {
  static std::shared_ptr<Module> of(std::shared_ptr<Module> module, const Options& /*options*/) {
    return module;
  }
};
template <class Module>
struct MakePart<FullyShardedDataParallel<Module>> {
  static auto of(std::shared_ptr<Module> module, const Options& options) {
    return std::make_shared<FullyShardedDataParallel<Module>>(std::move(module), options);
  }
};

/// Two blocks within a module that may be wrapped, too.
template <class Inner>
struct Pair : nn::Module {
  explicit Pair(const Options& options) {
    torch::manual_seed(3);
    for (const char* name : {"front", "back"}) {
      auto block = std::make_shared<Block>();
      block->to(at::kDouble);
      blocks.push_back(register_module(name, MakePart<Inner>::of(std::move(block), options)));
    }
    mix = register_module("mix", nn::Linear(5, 5));
    mix->to(at::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return mix(blocks[1]->forward(blocks[0]->forward(x))); }

  nn::Linear mix{nullptr};
  std::vector<std::shared_ptr<Inner>> blocks;
};

/// `Inner` and `Middle` are modules, or wrappers of them.
template <class Middle, class Inner>
struct Net : nn::Module {
  explicit Net(const Options& options) {
    torch::manual_seed(2);
    first = register_module("first", nn::Linear(3, 5));
    first->to(at::kDouble);
    pair = register_module("pair", MakePart<Middle>::of(std::make_shared<Pair<Inner>>(options), options));
    last = register_module("last", nn::Linear(5, 2));
    last->to(at::kDouble);
    auto block = std::make_shared<Block>();
    block->to(at::kDouble);
    tied = register_parameter("tied", block->down->weight);
    alone = register_module("alone", MakePart<Inner>::of(std::move(block), options));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto blocks = [this](const torch::Tensor& input) { return pair->forward(input); };
    auto y = torch::tanh(first(x));
    y = checkpointed ? activation_checkpoint({}, blocks, y) : blocks(y);
    y = alone->forward(y);
    within();
    return last(y + torch::matmul(torch::matmul(y, tied), tied.t()));
  }

  nn::Linear first{nullptr}, last{nullptr};
  std::shared_ptr<Middle> pair;
  std::shared_ptr<Inner> alone;
  torch::Tensor tied;
  bool checkpointed = false;
  std::function<void()> within = [] {};
};
using WrappedBlock = FullyShardedDataParallel<Block>;
using Plain = Net<Pair<Block>, Block>;
using Nested = Net<Pair<WrappedBlock>, WrappedBlock>;
using NestedTwice = Net<FullyShardedDataParallel<Pair<WrappedBlock>>, WrappedBlock>;

Options shared() {
  return {};
}
Options gathered() {
  return {.gather = true, .forward_prefetch = true};
}
Options gathered_until_backward() {
  return {.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP, .gather = true};
}

/// Accumulates, clips, and steps with AdamW.
template <class Model, class Optimizer, class Clip>
std::vector<double> train(Model& model, Optimizer& optimizer, const Clip& clip,
                          const std::function<void(const std::function<void()>&)>& without_sync, int ranks,
                          std::optional<int> rank) {
  std::vector<double> losses;
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    const auto all = random({2, ranks, 4, 3}, static_cast<uint64_t>(step));
    const auto loss = [&](int half) {
      const auto x = rank ? all[half][*rank] : all[half].flatten(0, 1);
      return fsdp_test::loss_of(model.forward(x));
    };
    without_sync([&] { loss(0).backward(); });
    const auto last = loss(1);
    last.backward();
    clip(0.3);
    optimizer.step();
    losses.push_back(last.template item<double>());
  }
  return losses;
}

template <class Module>
void expect_trains_as_one_process(const Options& options, int ranks, bool checkpointed, int hosts = 1) {
  run_ranks(ranks,
            [&](int rank) {
              auto world = init_process_group();
              const auto plain = std::make_shared<Plain>(options);
              std::vector<torch::Tensor> parameters;
              for (const auto& item : plain->named_parameters()) {
                if (item.key() != "tied") parameters.push_back(item.value());
              }
              optim::AdamW reference(parameters, optim::AdamWOptions(0.01));
              train(
                  *plain, reference, [&](double norm) { lockstep::clip_grad_norm_(parameters, norm); },
                  [](const auto& action) { action(); }, ranks, {});

              const auto net = std::make_shared<Module>(options);
              net->checkpointed = checkpointed;
              FullyShardedDataParallel model(net, options);
              const auto optimizer = model.template make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
              train(
                  model, *optimizer, [&](double norm) { model.clip_grad_norm_(norm); },
                  [&](const auto& action) {
                    const auto guard = model.no_sync();
                    action();
                  },
                  ranks, rank);
              StateDict state = model.full_state_dict();
              for (const auto& item : plain->named_parameters()) {
                ASSERT_TRUE(state.contains(item.key())) << item.key();
                EXPECT_LT(testing::difference(state.at(item.key()).toTensor(), item.value()), 1e-10)
                    << item.key();
                state.erase(item.key());
              }
              for (const auto& item : plain->named_buffers())
                EXPECT_EQ(state.erase(item.key()), 1u) << item.key();
              EXPECT_TRUE(state.empty());
              std::vector<std::string> names, expected;
              for (const auto& parameter : model.named_parameters()) names.push_back(parameter.first);
              for (const auto& item : plain->named_parameters()) {
                if (item.key() != "alone.down.weight")
                  expected.push_back(item.key());  // it is there as "tied"
              }
              EXPECT_EQ(names, expected) << "in definition order";
            },
            {.hosts = hosts});
}

TEST(FsdpParts, TrainAsOneProcess) {
  for (const Options& options : {shared(), gathered()}) {
    expect_trains_as_one_process<Nested>(options, 3, /*checkpointed=*/false);
    expect_trains_as_one_process<NestedTwice>(options, 2, /*checkpointed=*/true);
  }
  expect_trains_as_one_process<Nested>(gathered_until_backward(), 2, /*checkpointed=*/true);
}

TEST(FsdpParts, TrainOverSeveralHosts) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_trains_as_one_process<NestedTwice>({.sharding_strategy = ShardingStrategy::HYBRID_SHARD}, 4,
                                            /*checkpointed=*/false, /*hosts=*/2);
  expect_trains_as_one_process<Nested>(Options{}, 2, /*checkpointed=*/false, /*hosts=*/2);
}

/// The names of the parameters that have values now.
std::set<std::string> whole(const std::vector<NamedTensor>& parameters) {
  std::set<std::string> names;
  for (const auto& [name, parameter] : parameters) {
    const auto& data = parameter.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
    if (data.get() != nullptr) names.insert(name);
  }
  return names;
}

TEST(FsdpParts, AreGroupsOfTheirOwn) {
  run_ranks(2, [](int /*rank*/) {
    auto world = init_process_group();
    const Options options{.gather = true};
    const auto net = std::make_shared<NestedTwice>(options);
    FullyShardedDataParallel model(net, options);
    std::set<std::string> block{"alone.up.weight", "alone.up.bias", "alone.down.weight",
                                "alone.down.bias", "alone.scale",   "tied"};
    std::set<std::string> rest{"first.weight", "first.bias", "last.weight", "last.bias"};
    std::set<std::string> within, after;
    net->within = [&] { within = whole(model.module_parameters()); };
    model(torch::ones({2, 3}, at::kDouble));
    after = whole(model.module_parameters());
    for (const auto& name : block) EXPECT_TRUE(within.contains(name)) << name;
    EXPECT_TRUE(within.contains("pair.mix.weight")) << "the group before";
    EXPECT_FALSE(within.contains("pair.back.up.weight"));
    EXPECT_FALSE(within.contains("first.weight"));
    block.insert(rest.begin(), rest.end());
    EXPECT_EQ(after, block);
  });
}

TEST(FsdpParts, HaveTheirForwardAlone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const Options& options : {shared(), gathered()}) {
      const auto x = random({2, 5}, static_cast<uint64_t>(rank));
      const auto plain = std::make_shared<Plain>(options);
      const auto net = std::make_shared<NestedTwice>(options);
      EXPECT_TRUE(at::equal(net->pair->forward(x), plain->pair->forward(x))) << "before it is a part";
      const auto text = HasSubstr("a part of the model that another one wraps");
      {
        FullyShardedDataParallel model(net, options);
        EXPECT_TRUE(at::equal(net->pair->forward(x), plain->pair->forward(x)));
        EXPECT_TRUE(at::equal(net->pair->module->blocks[0]->forward(x), plain->pair->blocks[0]->forward(x)));
        EXPECT_THAT(message_of<c10::Error>([&] { (void)net->pair->parameters(); }), text);
        EXPECT_THAT(message_of<c10::Error>(
                        [&] { (void)net->alone->make_optimizer<optim::SGD>(optim::SGDOptions(0.1)); }),
                    text);
        EXPECT_THAT(message_of<c10::Error>([&] { (void)net->alone->full_state_dict(); }), text);
        EXPECT_THAT(message_of<c10::Error>([&] { (void)net->alone->no_sync(); }), text);
        EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel again(net, options); }),
                    HasSubstr("'pair' is a part of another FullyShardedDataParallel already"));
        model.train(false);
        EXPECT_FALSE(net->pair->module->blocks[1]->module->is_training());
        fsdp_test::loss_of(model(random({2, 3}, 1))).backward();
        model.zero_grad();
        for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
      }
      EXPECT_THAT(message_of<c10::Error>([&] { net->alone->forward(x); }), HasSubstr("is gone"));
    }
  });
}

TEST(FsdpParts, AreSavedAndLoadedWithTheWhole) {
  run_ranks(2, [](int /*rank*/) {
    auto world = init_process_group();
    const auto plain = std::make_shared<Plain>(shared());
    std::stringstream file;
    torch::serialize::OutputArchive out;
    plain->save(out);
    out.save_to(file);
    for (const Options& options : {shared(), gathered()}) {
      FullyShardedDataParallel model(std::make_shared<NestedTwice>(options), options);
      model.summon_full_params([&] {
        const torch::NoGradGuard no_grad;
        for (const auto& [name, parameter] : model.module_parameters()) parameter.zero_();
      });
      torch::serialize::InputArchive in;
      file.seekg(0);
      in.load_from(file);
      model.load(in);
      auto state = model.full_state_dict();
      for (const auto& item : plain->named_parameters()) {
        EXPECT_TRUE(at::equal(state.at(item.key()).toTensor(), item.value())) << item.key();
      }
      if (model.gathers()) continue;
      torch::serialize::OutputArchive again;
      std::stringstream other;
      model.save(again);
      again.save_to(other);
      Plain loaded(options);
      for (auto& parameter : loaded.parameters()) parameter.detach().zero_();
      torch::serialize::InputArchive in_again;
      in_again.load_from(other);
      loaded.load(in_again);
      for (const auto& item : plain->named_parameters()) {
        EXPECT_TRUE(at::equal(loaded.named_parameters()[item.key()], item.value())) << item.key();
      }
    }
  });
}

/// A part in lower precision within a whole in full precision.
TEST(FsdpParts, KeepTheirMixedPrecision) {
  struct Outer : nn::Module {
    explicit Outer(const Options& options) {
      torch::manual_seed(1);
      block = register_module("block", MakePart<WrappedBlock>::of(std::make_shared<Block>(), options));
      last = register_module("last", nn::Linear(5, 2));
    }
    torch::Tensor forward(const torch::Tensor& x) { return last(block->forward(x).to(at::kFloat)); }
    std::shared_ptr<WrappedBlock> block;
    nn::Linear last = nullptr;
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<StateDict> states;
    for (const Options& options : {shared(), gathered()}) {
      Options half = options;
      half.mixed_precision = {
          .param_dtype = at::kBFloat16, .buffer_dtype = at::kDouble, .cast_forward_inputs = true};
      const auto net = std::make_shared<Outer>(half);
      FullyShardedDataParallel model(net, options);
      EXPECT_EQ(net->block->module->up->weight.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->block->module->count.scalar_type(), at::kDouble);
      EXPECT_EQ(net->last->weight.scalar_type(), at::kFloat);
      const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(1e-3));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        fsdp_test::loss_of(model(random({3, 5}, static_cast<uint64_t>(10 * step + rank), at::kFloat)))
            .backward();
        optimizer->step();
      }
      states.push_back(model.full_state_dict());
      EXPECT_EQ(states.back().at("block.count").toTensor().scalar_type(), at::kFloat);
    }
    for (const auto& [name, value] : states[0]) {
      EXPECT_EQ(value.toTensor().scalar_type(), at::kFloat) << name;
      EXPECT_TRUE(at::equal(value.toTensor(), states[1].at(name).toTensor())) << name;
    }
  });
}

TEST(FsdpParts, WhatDoesNotFitTogetherIsRefusedOnAllRanks) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto refusal = [](const std::shared_ptr<Nested>& net, const Options& options) {
      return message_of<c10::Error>([&] { FullyShardedDataParallel model(net, options); });
    };
    const auto net = std::make_shared<Nested>(shared());
    EXPECT_THAT(refusal(net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)}),
                HasSubstr("'pair.front' is a FullyShardedDataParallel itself, so an auto_wrap_policy"));
    EXPECT_THAT(refusal(net, gathered()), HasSubstr("another `gather` than the one around it"));
    EXPECT_THAT(refusal(net, {.sharding_strategy = ShardingStrategy::HYBRID_SHARD}),
                HasSubstr("another sharding_strategy"));
    const ProcessGroup alone[] = {new_group(std::vector<int>{0}), new_group(std::vector<int>{1})};
    EXPECT_THAT(refusal(net, {.process_group = alone[rank]}), HasSubstr("another process_group"));
    EXPECT_THAT(refusal(net, {.ignored_modules = {net->pair}}),
                HasSubstr("ignored_modules has 'pair.front'"));
    {
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (rank == 1) optimizer = net->alone->make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
      EXPECT_THAT(refusal(net, shared()),
                  HasSubstr(rank == 1 ? "an optimizer or a no_sync() of the module's 'alone' lives"
                                      : "1 rank of the group failed to be wrapped"));
    }
    const std::shared_ptr<nn::Module> itself = net->alone;
    EXPECT_THAT(message_of<c10::ValueError>([&] { FullyShardedDataParallel<nn::Module> model(itself); }),
                HasSubstr("the module is a FullyShardedDataParallel itself"));
    FullyShardedDataParallel model(net);  // it was left as it was
    EXPECT_EQ(model(torch::ones({2, 3}, at::kDouble)).size(1), 2);
  });
}

}  // namespace
}  // namespace lockstep::fsdp_parts_test

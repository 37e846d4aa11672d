// States of the optimizers of FullyShardedDataParallel, from one number of ranks to others, and beside a plain optimizer's.
#include <cstdint>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/objects.h>
#include <lockstep/nn/model_tensors.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_optim_state_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr int kSaving = 2;  // ranks
constexpr int kSteps = 3;   // before saving, and after
constexpr int kBatch = 12;  // of all ranks

/// Rows that no number of ranks divides, fewer rows than ranks, a number, and what has no gradient.
struct NetImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(5, 7));
  nn::Linear last = register_module("last", nn::Linear(7, 2));
  nn::Linear unused = register_module("unused", nn::Linear(2, 2));
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  torch::Tensor frozen = register_parameter("frozen", torch::full({7}, 0.5), /*requires_grad=*/false);

  torch::Tensor forward(const torch::Tensor& x) { return scale * last(torch::tanh(first(x)) + frozen); }
};
TORCH_MODULE(Net);
using Model = FullyShardedDataParallel<NetImpl>;

Net make_net() {
  torch::manual_seed(4);
  Net net;
  net->to(at::kDouble);
  return net;
}

std::vector<optim::OptimizerParamGroup> groups_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{parameters[0]},
                      std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(0.03).weight_decay(0)));
  groups.emplace_back(std::vector<torch::Tensor>(parameters.begin() + 1, parameters.end()));
  return groups;
}

/// An optimizer with options that give it all the state that it can have, plain and of a sharded model.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<optim::Optimizer>(const std::vector<torch::Tensor>&)> plain;
  std::function<std::unique_ptr<optim::Optimizer>(Model&)> sharded;
};

template <class Optimizer, class Options>
Kind kind_of(const std::string& name, const Options& options) {
  return {name,
          [options](const auto& parameters) { return std::make_unique<Optimizer>(parameters, options); },
          [options](Model& model) { return model.make_optimizer<Optimizer>(options); }};
}

std::vector<Kind> kinds() {
  const optim::AdamWOptions adamw(0.01);
  return {kind_of<optim::SGD>("SGD", optim::SGDOptions(0.05).momentum(0.9).nesterov(true)),
          kind_of<optim::Adam>("Adam", optim::AdamOptions(0.01).amsgrad(true).weight_decay(0.1)),
          {"AdamW",
           [adamw](const auto& parameters) {
             return std::make_unique<optim::AdamW>(groups_of(parameters), adamw);
           },
           [adamw](Model& model) {
             return model.make_optimizer<optim::AdamW>(groups_of(model.parameters()), adamw);
           }},
          kind_of<optim::RMSprop>("RMSprop", optim::RMSpropOptions(0.01).momentum(0.5).centered(true)),
          kind_of<optim::Adagrad>("Adagrad",
                                  optim::AdagradOptions(0.05).lr_decay(0.1).initial_accumulator_value(0.1))};
}

/// Some steps, of which a rank computes its share.
template <class AnyModel>
void train(AnyModel& model, optim::Optimizer& optimizer, int from, int rank, int ranks) {
  for (int step = from; step < from + kSteps; ++step) {
    optimizer.zero_grad();
    const int64_t share = kBatch / ranks;
    const auto x =
        testing::random({kBatch, 5}, static_cast<uint64_t>(100 + step)).narrow(0, rank * share, share);
    const torch::Tensor output = model.forward(x);
    (output.square().mean() + output.mean()).backward();
    optimizer.step();
  }
}

/// Tensors differ by less than `bound`, or by nothing; the rest is the same.
void expect_close(const c10::IValue& actual, const c10::IValue& expected, const std::string& place,
                  double bound = 1e-10) {
  if (expected.isTensor()) {
    ASSERT_TRUE(actual.isTensor()) << place;
    const torch::Tensor &a = actual.toTensor(), &b = expected.toTensor();
    ASSERT_EQ(a.sizes(), b.sizes()) << place;
    ASSERT_EQ(a.dtype(), b.dtype()) << place;
    if (a.numel() == 0) return;
    EXPECT_TRUE(bound == 0 ? at::equal(a, b) : testing::difference(a, b) < bound) << place;
  } else if (expected.isGenericDict()) {
    const auto a = actual.toGenericDict(), b = expected.toGenericDict();
    EXPECT_EQ(a.size(), b.size()) << place;
    for (const auto& item : b) {
      const std::string& key = item.key().toStringRef();
      ASSERT_TRUE(a.contains(item.key())) << place << "." << key;
      expect_close(a.at(item.key()), item.value(), place + "." + key, bound);
    }
  } else if (expected.isList() || expected.isTuple()) {
    const auto a = serialization::elements_of(actual), b = serialization::elements_of(expected);
    ASSERT_EQ(a.size(), b.size()) << place;
    for (size_t i = 0; i < b.size(); ++i) {
      expect_close(a[i], b[i], place + "." + std::to_string(i), bound);
    }
  } else {
    EXPECT_EQ(actual, expected) << place;
  }
}

void expect_close(const StateDict& actual, const StateDict& expected, const std::string& place,
                  double bound = 1e-10) {
  expect_close(to_object(actual), to_object(expected), place, bound);
}

StateDict state_of(const Net& net) {
  StateDict state;
  for (const auto& item : net->named_parameters()) state.emplace(item.key(), item.value().detach());
  return state;
}

/// What ranks 0 and 1 have trained, as rank 0 and 1 have told all.
struct Saved {
  StateDict model, optimizer;
  std::vector<fsdp::ShardedStateDict> model_shards;
  std::vector<StateDict> optimizer_shards;
  StateDict undisturbed;  // the model after the other steps
};

Saved train_and_save(const Kind& kind, int rank, const ProcessGroup& group) {
  std::vector<c10::IValue> own(4);
  if (rank < kSaving) {
    Net net = make_net();
    Model model(net, {.process_group = group, .auto_wrap_policy = fsdp::size_based_auto_wrap_policy(5)});
    const auto optimizer = kind.sharded(model);
    train(model, *optimizer, 0, rank, kSaving);
    own[0] = to_object(model.full_state_dict());
    own[1] = to_object(model.full_optim_state_dict(*optimizer));
    const auto of_rank_0 = model.full_optim_state_dict(*optimizer, /*rank0_only=*/true);
    EXPECT_EQ(from_object<StateDict>(of_rank_0.at("state")).empty(), rank != 0);
    own[2] = to_object(std::pair(model.sharded_state_dict(), model.sharded_optim_state_dict(*optimizer)));
    train(model, *optimizer, kSteps, rank, kSaving);
    own[3] = to_object(model.full_state_dict());
  }
  std::vector<c10::IValue> all(static_cast<size_t>(get_world_size()));
  all_gather_object(all, to_object(own));
  Saved saved;
  for (int of = 0; of < kSaving; ++of) {
    const auto told = from_object<std::vector<c10::IValue>>(all[static_cast<size_t>(of)]);
    if (of == 0) {
      saved.model = from_object<StateDict>(told[0]);
      saved.optimizer = from_object<StateDict>(told[1]);
      saved.undisturbed = from_object<StateDict>(told[3]);
    }
    auto [model, optimizer] = from_object<std::pair<fsdp::ShardedStateDict, StateDict>>(told[2]);
    saved.model_shards.push_back(std::move(model));
    saved.optimizer_shards.push_back(std::move(optimizer));
  }
  return saved;
}

/// Loads what two ranks have saved, and goes on; `sharded`: from the ranks' own states.
StateDict load_and_train(const Kind& kind, const Saved& saved, int rank, const ProcessGroup& group,
                         bool sharded) {
  Net net;  // other values
  net->to(at::kDouble);
  Model model(net, {.process_group = group, .sync_module_states = true});
  const auto optimizer = kind.sharded(model);
  if (sharded) {
    model.load_sharded_state_dict(saved.model_shards);
    model.load_sharded_optim_state_dict(*optimizer, saved.optimizer_shards);
  } else {
    model.load_full_state_dict(saved.model);
    model.load_full_optim_state_dict(*optimizer, saved.optimizer);
  }
  // Whatever the way, all of it came to where it belongs, to the last bit.
  expect_close(model.full_state_dict(), saved.model, kind.name, 0);
  expect_close(model.full_optim_state_dict(*optimizer), saved.optimizer, kind.name, 0);
  train(model, *optimizer, kSteps, rank, get_world_size(group));
  return model.full_state_dict();
}

TEST(FsdpOptimState, GoesOnAsUndisturbedOnAnyNumberOfRanks) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    std::vector<ProcessGroup> groups;  // of the first so many ranks
    for (int ranks = 1; ranks <= 4; ++ranks) {
      std::vector<int> members;
      for (int member = 0; member < ranks; ++member) members.push_back(member);
      groups.push_back(new_group(members));
    }
    for (const Kind& kind : kinds()) {
      SCOPED_TRACE(kind.name);
      const Saved saved = train_and_save(kind, rank, groups[kSaving - 1]);
      for (int ranks = 1; ranks <= 4; ++ranks) {
        if (rank >= ranks) continue;
        for (const bool sharded : {false, true}) {
          const auto actual =
              load_and_train(kind, saved, rank, groups[static_cast<size_t>(ranks - 1)], sharded);
          // On as many ranks it is the same to the last bit.
          expect_close(actual, saved.undisturbed, kind.name + " on " + std::to_string(ranks),
                       ranks == kSaving ? 0 : 1e-10);
        }
      }
    }
  });
}

TEST(FsdpOptimState, IsAPlainOptimizersAndTheyLoadEachOthers) {
  run_ranks(kSaving, [](int rank) {
    auto world = init_process_group();
    for (const Kind& kind : kinds()) {
      SCOPED_TRACE(kind.name);
      Net alone = make_net();
      const auto plain = kind.plain(alone->parameters());
      train(*alone, *plain, 0, 0, 1);
      Net net = make_net();
      Model model(net);
      const auto optimizer = kind.sharded(model);
      train(model, *optimizer, 0, rank, kSaving);
      const auto full = model.full_optim_state_dict(*optimizer);
      expect_close(full, get_optimizer_state_dict(alone, *plain), kind.name);

      // The other way round.
      Net third = make_net();
      const auto of_full = kind.plain(third->parameters());
      set_optimizer_state_dict(third, *of_full, full);
      Net fourth = make_net();
      Model of_plain(fourth);
      const auto of_plain_optimizer = kind.sharded(of_plain);
      of_plain.load_full_state_dict(state_of(alone));
      of_plain.load_full_optim_state_dict(*of_plain_optimizer, get_optimizer_state_dict(alone, *plain));
      {
        const torch::NoGradGuard no_grad;
        for (auto& item : third->named_parameters()) {
          item.value().copy_(state_of(alone).at(item.key()).toTensor());
        }
      }
      train(*alone, *plain, kSteps, 0, 1);
      train(*third, *of_full, kSteps, 0, 1);
      train(of_plain, *of_plain_optimizer, kSteps, rank, kSaving);
      expect_close(state_of(third), state_of(alone), kind.name);
      expect_close(of_plain.full_state_dict(), state_of(alone), kind.name);
    }
  });
}

TEST(FsdpOptimState, WhatDoesNotFitIsRefusedAndChangesNothing) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    Model model(net);
    const auto optimizer = model.make_optimizer<optim::Adam>(optim::AdamOptions(0.01));
    train(model, *optimizer, 0, rank, 2);
    const auto weights = model.sharded_state_dict();
    const auto own = model.sharded_optim_state_dict(*optimizer);
    const auto before = model.full_optim_state_dict(*optimizer);
    std::vector<c10::IValue> all(2);
    all_gather_object(all, to_object(std::pair(weights, own)));
    const auto [others_weights, others] =
        from_object<std::pair<fsdp::ShardedStateDict, StateDict>>(all[static_cast<size_t>(1 - rank)]);
    const std::string missing = "is in no part of the state; load the states of all ranks that wrote it";
    EXPECT_THAT(
        message_of<c10::ValueError>([&] { model.load_sharded_optim_state_dict(*optimizer, {others}); }),
        HasSubstr(missing));
    EXPECT_THAT(message_of<c10::Error>([&] { model.load_sharded_state_dict({others_weights}); }),
                HasSubstr(missing));
    EXPECT_THAT(message_of<c10::ValueError>([&] { model.load_sharded_optim_state_dict(*optimizer, {}); }),
                HasSubstr("there is no state"));
    EXPECT_THROW(model.load_sharded_optim_state_dict(*optimizer, {before}), c10::ValueError) << "a full one";
    EXPECT_THROW(model.load_full_optim_state_dict(*optimizer, own), c10::ValueError) << "a sharded one";
    auto moved = weights;
    moved[0].second.global_sizes = {9};
    EXPECT_THAT(message_of<c10::Error>([&] { model.load_sharded_state_dict({moved}); }),
                HasSubstr("but the state has a part of"));
    expect_close(to_object(model.sharded_state_dict()), to_object(weights), "after", 0);
    expect_close(model.full_optim_state_dict(*optimizer), before, "after", 0);
    EXPECT_NO_THROW(model.load_sharded_optim_state_dict(*optimizer, {own})) << "its own, on as many ranks";

    optim::LBFGS lbfgs(model.parameters(), optim::LBFGSOptions(0.1));
    for (const auto& state : {std::function([&] { model.full_optim_state_dict(lbfgs); }),
                              std::function([&] { model.sharded_optim_state_dict(lbfgs); }),
                              std::function([&] { model.load_full_optim_state_dict(lbfgs, before); }),
                              std::function([&] { model.load_sharded_optim_state_dict(lbfgs, {own}); })}) {
      EXPECT_THAT(message_of<c10::ValueError>(state), HasSubstr("such as LBFGS, can't be sharded"));
    }
    static_assert(!ElementwiseOptimizer<optim::LBFGS>);
  });
}

TEST(FsdpOptimState, WhatDoesNotFitOnOneRankIsLoadedOnNone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Model model(make_net());
    const auto optimizer = model.make_optimizer<optim::Adam>(optim::AdamOptions(0.01));
    train(model, *optimizer, 0, rank, 2);
    const auto sharded = model.sharded_optim_state_dict(*optimizer);
    const auto full = model.full_optim_state_dict(*optimizer);
    train(model, *optimizer, kSteps, rank, 2);
    const auto before = model.full_optim_state_dict(*optimizer);
    const std::string other = "1 rank of the group failed to load the optimizer's state, which is as it was";
    EXPECT_THAT(message_of<c10::Error>([&] {
                  model.load_sharded_optim_state_dict(*optimizer,
                                                      rank == 1 ? std::vector{full} : std::vector{sharded});
                }),
                HasSubstr(rank == 1 ? "" : other));
    EXPECT_THAT(message_of<c10::Error>(
                    [&] { model.load_full_optim_state_dict(*optimizer, rank == 1 ? sharded : full); }),
                HasSubstr(rank == 1 ? "" : other));
    expect_close(model.full_optim_state_dict(*optimizer), before, "after", 0);
    model.load_full_optim_state_dict(*optimizer, full);
    expect_close(model.full_optim_state_dict(*optimizer), full, "loaded", 0);
  });
}

TEST(FsdpOptimState, IgnoredParametersStateIsRank0s) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net net = make_net();
    Model model(net, {.ignored_parameters = {net->scale}});
    const auto optimizer = model.make_optimizer<optim::Adam>(optim::AdamOptions(0.01));
    train(model, *optimizer, 0, rank, 2);
    std::vector<c10::IValue> all(2);
    all_gather_object(all, to_object(model.sharded_optim_state_dict(*optimizer)));
    model.load_sharded_optim_state_dict(*optimizer,
                                        {from_object<StateDict>(all[0]), from_object<StateDict>(all[1])});
    const auto of_scale = [](const StateDict& state) {
      const auto by_parameter = from_object<StateDict>(state.at("state"));
      return from_object<StateDict>(by_parameter.at("scale")).at("exp_avg").toTensor();
    };
    EXPECT_TRUE(testing::same_everywhere(of_scale(model.full_optim_state_dict(*optimizer))));
    EXPECT_TRUE(at::equal(of_scale(model.full_optim_state_dict(*optimizer)),
                          of_scale(from_object<StateDict>(all[0]))));
  });
}

}  // namespace
}  // namespace lockstep::fsdp_optim_state_test

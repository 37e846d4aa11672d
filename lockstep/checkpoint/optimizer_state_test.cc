// Optimizers' states by their parameters' names in a model, whole and in the shards of ranks.
#include <functional>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/checkpoint/testing/named_states.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/optim/optimizer_format.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::optimizer_state_test {
namespace {

namespace optim = torch::optim;
using ::testing::AllOf;
using testing::copied;
using ::testing::ElementsAre;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::train;
using Net = testing::NormNet;

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>;

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<at::Tensor> parameters) -> std::unique_ptr<optim::Optimizer> {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  return {{"SGD", maker<optim::SGD>(optim::SGDOptions(0.02).momentum(0.9))},
          {"plain SGD", maker<optim::SGD>(optim::SGDOptions(0.02))},
          {"Adam", maker<optim::Adam>(optim::AdamOptions(0.02).amsgrad(true))},
          {"AdamW", maker<optim::AdamW>(optim::AdamWOptions(0.02))},
          {"RMSprop", maker<optim::RMSprop>(optim::RMSpropOptions(0.002).momentum(0.3).centered(true))},
          {"Adagrad", maker<optim::Adagrad>(optim::AdagradOptions(0.02).lr_decay(0.1))},
          {"LBFGS", maker<optim::LBFGS>(optim::LBFGSOptions(0.2).max_iter(4).history_size(3))}};
}

TEST(OptimizerStateDict, ALoadedOneGoesOnAsTheSavedOne) {
  for (const auto& [name, make] : optimizers()) {
    for (const bool by_name : {true, false}) {
      Net net;
      auto optimizer = make(net->parameters());
      train(net, *optimizer, 0, 4);
      // By name the order may be another, but for LBFGS, which has one state for all.
      Net later(by_name && name != "LBFGS");
      load_state_dict(later, state_dict(net));
      auto loaded = make(later->parameters());
      for (auto& group : loaded->param_groups()) group.options().set_lr(77);
      if (by_name) {
        set_optimizer_state_dict(later, *loaded, get_optimizer_state_dict(net, *optimizer));
      } else {
        load_state_dict(*loaded, state_dict(*optimizer));
      }
      EXPECT_EQ(loaded->param_groups()[0].options().get_lr(),
                optimizer->param_groups()[0].options().get_lr());
      train(later, *loaded, 4, 8);
      train(net, *optimizer, 4, 8);  // last: nothing was shared
      expect_equal(state_dict(later), state_dict(net));
    }
  }
  Net net, other(true);
  optim::LBFGS lbfgs(net->parameters()), reordered(other->parameters());
  train(net, lbfgs, 0, 2);
  EXPECT_THAT(message_of<c10::Error>(
                  [&] { set_optimizer_state_dict(other, reordered, get_optimizer_state_dict(net, lbfgs)); }),
              HasSubstr("LBFGS has one state for all parameters, in their order"));
}

TEST(OptimizerStateDict, RefusesWhatItCannotDoAndChangesNothing) {
  Net net;
  optim::Adam optimizer(net->parameters(), optim::AdamOptions(0.01));
  train(net, optimizer, 0, 2);
  const auto good = copied(get_optimizer_state_dict(net, optimizer));
  const auto with = [&](const std::string& key, const c10::IValue& value) {
    StateDict state = copied(good);
    auto groups = from_object<std::vector<StateDict>>(state.at("param_groups"));
    groups[0][key] = value;
    groups[0]["lr"] = 5.0;
    state["param_groups"] = to_object(groups);
    return state;
  };
  const auto with_state = [&](const std::string& key, const c10::IValue& value) {
    StateDict state = copied(good);
    auto states = from_object<std::map<std::string, StateDict>>(state.at("state"));
    states.at("second.weight")[key] = value;
    state["state"] = to_object(states);
    return state;
  };
  const auto error_of = [&](const StateDict& state) {
    const auto text = message_of<c10::Error>([&] { set_optimizer_state_dict(net, optimizer, state); });
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01);
    return text;
  };
  EXPECT_THAT(error_of(with("maximize", true)),
              HasSubstr("'maximize' is true, which LibTorch's Adam doesn't have"));
  EXPECT_THAT(error_of(with("decoupled_weight_decay", true)), HasSubstr("make it a torch::optim::AdamW"));
  EXPECT_THAT(error_of(with("betas", 0.9)), HasSubstr("parameter group 0: "));
  EXPECT_THAT(error_of(with("amsgrad", true)), HasSubstr("there is no 'max_exp_avg_sq'"));
  EXPECT_THAT(error_of(with("params", to_object(std::vector<std::string>{"first.weight", "other"}))),
              AllOf(HasSubstr("Missing key(s) in state_dict: \"first.bias\", \"second.weight\", "),
                    HasSubstr("Unexpected key(s) in state_dict: \"other\"")));
  EXPECT_THAT(error_of(with_state("exp_avg", at::ones({3}))),
              HasSubstr("the state of \"second.weight\": 'exp_avg' has sizes [3], the parameter [2, 6]"));
  EXPECT_THAT(error_of(with_state("step", -1)), HasSubstr("\"second.weight\""));
  EXPECT_THAT(error_of(with_state("step", at::scalar_tensor(1.5))), HasSubstr("no number of steps"));
  EXPECT_THAT(error_of(with_state("exp_avg_sq", {})), HasSubstr("'exp_avg_sq' is no tensor"));
  EXPECT_THAT(error_of({}), HasSubstr("no 'param_groups'"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                load_state_dict(optimizer, {{"state", to_object(StateDict{})},
                                            {"param_groups", to_object(std::vector<StateDict>{})}});
              }),
              HasSubstr("loaded state dict has a different number of parameter groups"));
  Net other;
  EXPECT_THAT(message_of<c10::ValueError>([&] { get_optimizer_state_dict(other, optimizer); }),
              HasSubstr("is none of the model"));
  const auto now =
      from_object<std::map<std::string, StateDict>>(get_optimizer_state_dict(net, optimizer).at("state"));
  for (const auto& [name, state] : from_object<std::map<std::string, StateDict>>(good.at("state"))) {
    expect_equal(now.at(name), state);
  }

  // Lenient: what is missing stays.
  StateDict part = copied(good);
  auto groups = from_object<std::vector<StateDict>>(part.at("param_groups"));
  groups[0]["params"] = to_object(std::vector<std::string>{"first.weight", "gone"});
  groups[0]["lr"] = 0.5;
  part["param_groups"] = to_object(groups);
  const auto keys = set_optimizer_state_dict(net, optimizer, part, {.strict = false});
  EXPECT_EQ(keys.missing_keys.size(), 5U);
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("gone"));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_EQ(optimizer.state().size(), 6U);
}

/// An optimizer without a known format; with a format it tells its own.
struct SignSgd : optim::Optimizer {
  explicit SignSgd(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<optim::SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure) override { return {}; }
};
struct KnownSignSgd : SignSgd, OptimizerFormat {
  using SignSgd::SignSgd;
  std::string optimizer_name() const override { return "SignSGD"; }
  StateDict get_options(const optim::OptimizerOptions& options) const override {
    return {{"lr", options.get_lr()}};
  }
  void set_options(const StateDict& from, optim::OptimizerOptions& options) const override {
    options.set_lr(optimizer_format::number_at(from, "lr"));
  }
  StateDict get_state(const optim::OptimizerParamState&) const override { return {}; }
  std::unique_ptr<optim::OptimizerParamState> make_state(const StateDict&, const at::Tensor&,
                                                         const optim::OptimizerOptions&) const override {
    return nullptr;
  }
};

TEST(OptimizerStateDict, AnUnknownOptimizerSaysHowToBecomeKnown) {
  Net net;
  SignSgd unknown(net->parameters());
  EXPECT_THAT(message_of<c10::ValueError>([&] { get_optimizer_state_dict(net, unknown); }),
              AllOf(HasSubstr("SignSgd"), HasSubstr("derive from lockstep::OptimizerFormat")));
  KnownSignSgd known(net->parameters());
  auto state = state_dict(known);
  known.param_groups()[0].options().set_lr(3);
  load_state_dict(known, state);
  EXPECT_EQ(known.param_groups()[0].options().get_lr(), 0.1);
}

/// What saving does with the ranks' parts: dicts are united.
void unite(StateDict& all, const StateDict& part) {
  for (const auto& [key, value] : part) {
    if (key == "state" || key == "optimizer") {
      StateDict inner = all.contains(key) ? from_object<StateDict>(all.at(key)) : StateDict{};
      unite(inner, from_object<StateDict>(value));
      all[key] = to_object(inner);
    } else {
      all.emplace(key, value);
    }
  }
}

TEST(OptimizerStateDict, ShardsOfTwoRanksLoadOnThreeAndOnOne) {
  const testing::SharedFolder folder;
  const testing::RunRanksOptions options{.environment = folder.environment()};
  const auto shared = [&](int rank) { return folder.path(std::to_string(rank) + ".pt"); };
  const auto make = optimizer_class<optim::AdamW>(optim::AdamWOptions(0.02));
  const auto save = [&](int rank) {
    auto world = init_process_group();
    torch::manual_seed(3);
    Net net;
    ZeroRedundancyOptimizer zero(net->parameters(), make);
    EXPECT_THAT(message_of<c10::Error>([&] { state_dict(zero); }), HasSubstr("has not been consolidated"));
    train(net, zero, 0, 3);
    TrainingState state;
    state.add_model("model", net);
    state.add_optimizer("optimizer", zero, net);
    save_python_checkpoint(state.state_dict(), shared(rank));
    const auto mine = from_object<StateDict>(get_optimizer_state_dict(net, zero).at("state"));
    EXPECT_GT(mine.size(), 0U);
    EXPECT_LT(mine.size(), 6U);
    zero.consolidate_state_dict(1);
    if (rank == 1) save_python_checkpoint(state_dict(zero), shared(9));
    train(net, zero, 3, 6);
    if (rank == 0) save_python_checkpoint(state_dict(net), shared(5));
  };
  run_ranks(2, save, options);
  const auto check = [&] {
    StateDict all = load_python_checkpoint(shared(0));
    unite(all, load_python_checkpoint(shared(1)));
    Net net;
    const auto expected = load_python_checkpoint(shared(5));
    const auto go_on = [&](optim::Optimizer& optimizer) {
      TrainingState state;
      state.add_model("model", net);
      state.add_optimizer("optimizer", optimizer, net);
      state.load_state_dict(all);
      train(net, optimizer, 3, 6);
      expect_equal(state_dict(net), expected);
    };
    if (!is_initialized()) {
      optim::AdamW plain(net->parameters(), optim::AdamWOptions(0.5));
      go_on(plain);
      load_state_dict(net, from_object<StateDict>(all.at("model")));
      load_state_dict(plain, load_python_checkpoint(shared(9)));
      train(net, plain, 3, 6);
      expect_equal(state_dict(net), expected);
      return;
    }
    ZeroRedundancyOptimizer zero(net->parameters(), make);
    go_on(zero);
    load_state_dict(net, from_object<StateDict>(all.at("model")));
    load_state_dict(zero, load_python_checkpoint(shared(9)));
    train(net, zero, 3, 6);
    expect_equal(state_dict(net), expected);
  };
  const auto check_on_three = [&](int) {
    auto world = init_process_group();
    check();
  };
  run_ranks(3, check_on_three, options);
  run_ranks(
      1, [&](int) { check(); }, options);
}

TEST(OptimizerStateDict, PostLocalSgdHasItsAveragersStep) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    Net net;
    const auto make = [&] {
      return PostLocalSGDOptimizer(
          std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions(0.01).momentum(0.9)),
          std::make_shared<PeriodicModelAverager>(2));
    };
    auto optimizer = make();
    train(net, optimizer, 0, 3);
    const auto state = copied(get_optimizer_state_dict(net, optimizer));
    EXPECT_EQ(state.at("step").toInt(), 3);
    auto later = make();
    later.param_groups()[0].options().set_lr(9);
    set_optimizer_state_dict(net, later, state);
    EXPECT_EQ(later.averager().step(), 3);
    EXPECT_EQ(later.optim().state().size(), 6U);
    EXPECT_EQ(later.optim().param_groups()[0].options().get_lr(), 0.01);
    EXPECT_EQ(state_dict(later).at("step").toInt(), 3);
  });
}

}  // namespace
}  // namespace lockstep::optimizer_state_test

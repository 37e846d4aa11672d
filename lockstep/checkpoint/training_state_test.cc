// What a checkpoint holds: models' and optimizers' states by name, random numbers, and all of it as one.
#include <gmock/gmock.h>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/optim/averaged_model.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/optim/optimizer_format.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::training_state_test {
namespace {

namespace optim = torch::optim;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::run_ranks;

/// With `reversed`, the names are the same and their order is not.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  explicit NetImpl(bool reversed = false) : reversed(reversed) { reset(); }
  void reset() override {
    torch::nn::Linear one(4, 6), two(6, 2);
    if (!reversed) first = register_module("first", one);
    second = register_module("second", two);
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    if (reversed) first = register_module("first", one);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
  bool reversed;
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

torch::Tensor inputs(int64_t step) {
  return at::randn({5, 4}, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step)), at::kFloat);
}

template <class Model>
void train(Model& model, optim::Optimizer& optimizer, int64_t begin, int64_t end) {
  for (int64_t step = begin; step < end; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = model(inputs(step)).square().sum();
      loss.backward();
      return loss;
    });
  }
}

/// A copy that shares no memory, as after a file.
StateDict copied(const StateDict& state) {
  return from_object<StateDict>(to_object(state).deepcopy());
}

void expect_equal(const StateDict& actual, const StateDict& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    EXPECT_TRUE(at::equal(actual.at(name).toTensor(), value.toTensor())) << name;
  }
}

std::vector<std::string> keys_of(const StateDict& state) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : state) keys.push_back(key);
  return keys;
}

const std::vector<std::string> kNames{
    "first.bias",        "first.weight",     "norm.bias",   "norm.num_batches_tracked",
    "norm.running_mean", "norm.running_var", "norm.weight", "second.bias",
    "second.weight"};

// ---- Models ----

TEST(ModelStateDict, AllKindsOfModelsHaveTheNamesOfThePlainModule) {
  Net net;
  EXPECT_EQ(keys_of(state_dict(net)), kNames);
  EXPECT_EQ(keys_of(state_dict(*net)), kNames);
  EXPECT_EQ(keys_of(state_dict(net.ptr())), kNames);
  EXPECT_EQ(keys_of(state_dict(torch::nn::AnyModule(net))), kNames);
  EXPECT_EQ(keys_of(state_dict(DataParallel(net, {.num_replicas = 2}))), kNames);
  EXPECT_EQ(keys_of(state_dict(torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::ReLU()))),
            (std::vector<std::string>{"0.bias", "0.weight"}));
  const auto averaged = keys_of(state_dict(swa_utils::AveragedModel(net)));
  EXPECT_EQ(averaged.size(), kNames.size() + 1);
  EXPECT_EQ(averaged.front(), "module.first.bias");
  EXPECT_EQ(averaged.back(), "n_averaged");
  EXPECT_THAT(message_of<c10::ValueError>([] { state_dict(std::shared_ptr<NetImpl>()); }),
              HasSubstr("empty"));

  torch::jit::Module script("m");
  script.register_parameter("w", at::ones({2}), /*is_buffer=*/false);
  script.register_buffer("seen", at::zeros({}, at::kLong));
  EXPECT_EQ(keys_of(state_dict(script)), (std::vector<std::string>{"seen", "w"}));
  load_state_dict(script, {{"w", at::full({2}, 3)}, {"seen", at::scalar_tensor(4)}});
  EXPECT_EQ(script.attr("seen").toTensor().item<int64_t>(), 4);
  EXPECT_EQ(script.attr("w").toTensor()[1].item<float>(), 3);

  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net inner;
    DistributedDataParallel model(inner);
    EXPECT_EQ(keys_of(state_dict(model)), kNames);
    EXPECT_EQ(keys_of(state_dict(
                  std::make_shared<DistributedDataParallel<torch::nn::LinearImpl>>(torch::nn::Linear(2, 1)))),
              (std::vector<std::string>{"bias", "weight"}));
    Net other;
    optim::SGD optimizer(model.parameters(), optim::SGDOptions(0.1).momentum(0.9));
    load_state_dict(model, state_dict(other));
    if (rank == 1) load_state_dict(model, state_dict(inner));
    EXPECT_EQ(get_optimizer_state_dict(model, optimizer).size(), 2U);
  });
}

TEST(ModelStateDict, LoadsInPlaceAndConverts) {
  Net from, to;
  from->to(at::kDouble);
  std::vector<const void*> memory;
  for (const auto& tensor : to->parameters()) memory.push_back(tensor.const_data_ptr());
  const auto keys = load_state_dict(to, state_dict(from));
  EXPECT_THAT(keys.missing_keys, IsEmpty());
  EXPECT_THAT(keys.unexpected_keys, IsEmpty());
  for (size_t i = 0; i < memory.size(); ++i) {
    const at::Tensor tensor = to->parameters()[i];
    EXPECT_EQ(tensor.const_data_ptr(), memory[i]);
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    EXPECT_TRUE(tensor.requires_grad());
    EXPECT_TRUE(at::equal(tensor, from->parameters()[i].to(at::kFloat)));
  }
}

TEST(ModelStateDict, AllThatIsWrongIsToldAtOnceAndNothingChanges) {
  Net net, other;
  const auto before = copied(state_dict(net));
  auto state = copied(state_dict(other));
  state.erase("first.bias");
  state.erase("norm.weight");
  state["third.weight"] = at::ones({1});
  state["second.weight"] = at::ones({2, 7});
  state["second.bias"] = "text";
  EXPECT_THAT(
      message_of<c10::Error>([&] { load_state_dict(net, state); }),
      HasSubstr("NetImpl:\n\tMissing key(s) in state_dict: \"first.bias\", \"norm.weight\". "
                "\n\tUnexpected key(s) in state_dict: \"third.weight\". "
                "\n\tsize mismatch for second.weight: copying a param with shape torch.Size([2, 7]) from "
                "checkpoint, "
                "the shape in current model is torch.Size([2, 6]).\n\tWhile copying the parameter named "
                "\"second.bias\", expected torch.Tensor or Tensor-like object from checkpoint but received "
                "String"));
  EXPECT_THAT(message_of<c10::Error>([&] { load_state_dict(net, state, {.strict = false}); }),
              AllOf(HasSubstr("size mismatch"), ::testing::Not(HasSubstr("Missing"))));
  expect_equal(state_dict(net), before);

  state.erase("second.weight"), state.erase("second.bias");
  const auto keys = load_state_dict(net, state, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("first.bias", "second.weight", "second.bias", "norm.weight"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("third.weight"));
  EXPECT_TRUE(at::equal(net->first->weight, other->first->weight));
  EXPECT_TRUE(at::equal(net->second->weight, before.at("second.weight").toTensor()));
}

TEST(ModelStateDict, NamesAreMapped) {
  Net net, other;
  StateDict state;
  for (const auto& [name, value] : copied(state_dict(other))) {
    state["module.backbone." + (name.starts_with("second") ? "head" + name.substr(6) : name)] = value;
  }
  state["module.extra"] = at::ones({1});
  const KeyMap drop = [](const std::string& key) {
    return key == "module.extra" ? std::nullopt : std::optional(key);
  };
  load_state_dict(
      net, state,
      {.key_map = {drop, strip_prefix("module."), replace_in_keys("^backbone\\.", ""),
                   rename_keys({{"head.weight", "second.weight"}, {"head.bias", "second.bias"}})}});
  expect_equal(state_dict(net), state_dict(other));
  EXPECT_THAT(message_of<c10::Error>([&] {
                load_state_dict(net, state_dict(other),
                                {.strict = false, .key_map = {replace_in_keys("second|first", "first")}});
              }),
              HasSubstr("\"first.weight\" and \"second.weight\" both become \"first.weight\" by key_map"));
  EXPECT_EQ(map_key({add_prefix("a.")}, "b"), "a.b");
  EXPECT_THAT(message_of<c10::ValueError>([] { replace_in_keys("(", ""); }),
              HasSubstr("no regular expression"));
}

// ---- Optimizers ----

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

// ---- Sharded optimizers ----

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

// ---- All of it ----

struct Program {
  Program()
      : optimizer(net->parameters(), optim::SGDOptions(0.1).momentum(0.9)),
        schedule(optimizer, 2, 0.5),
        scaler({.device = at::kCPU}) {
    state.add_model("model", net);
    state.add_optimizer("optimizer", optimizer, net);
    state.add("schedule", schedule);
    state.add("scaler", scaler);
    state.add("average", average);
    state.add_rng();
  }
  void run() {
    train(net, optimizer, 0, 2);
    schedule.step();
    average.update_parameters(net);
    at::rand({3});
  }

  Net net;
  optim::SGD optimizer;
  lr_scheduler::StepLR schedule;
  GradScaler scaler;
  swa_utils::AveragedModel<NetImpl> average{net};
  TrainingState state;
};

TEST(TrainingState, LoadsAllPartsOrNone) {
  Program saved;
  saved.run();
  const auto state = copied(saved.state.state_dict());
  const auto of_rank = copied(saved.state.rank_state_dict());
  EXPECT_EQ(keys_of(state),
            (std::vector<std::string>{"average", "model", "optimizer", "rng", "scaler", "schedule"}));
  EXPECT_EQ(keys_of(of_rank), std::vector<std::string>{"rng"});
  const at::Tensor next = at::rand({4});

  Program loaded;
  loaded.state.load_state_dict(state);
  loaded.state.load_rank_state_dict(of_rank);
  EXPECT_TRUE(at::equal(at::rand({4}), next));
  expect_equal(state_dict(loaded.net), state_dict(saved.net));
  expect_equal(state_dict(loaded.average), state_dict(saved.average));
  EXPECT_EQ(loaded.schedule.last_epoch(), 1);
  EXPECT_EQ(loaded.optimizer.state().size(), 6U);

  Program fresh;
  const auto before = copied(fresh.state.state_dict());
  const auto refuses = [&](const std::string& part, const StateDict& inner) {
    auto wrong = state;
    wrong[part] = to_object(inner);
    const auto text = message_of<c10::Error>([&] { fresh.state.load_state_dict(wrong); });
    expect_equal(state_dict(fresh.net), from_object<StateDict>(before.at("model")));
    EXPECT_THAT(fresh.optimizer.state(), IsEmpty());
    EXPECT_EQ(fresh.schedule.last_epoch(), 0);
    return text;
  };
  EXPECT_THAT(refuses("model", {{"x", at::ones({1})}}),
              AllOf(HasSubstr("Unexpected key(s) in state_dict: \"x\""), HasSubstr("while loading 'model'")));
  EXPECT_THAT(refuses("optimizer", {}), HasSubstr("while loading 'optimizer' of a TrainingState"));
  EXPECT_THAT(refuses("schedule", {}), HasSubstr("while loading 'schedule'"));
  // The schedule, loaded before it, is put back.
  EXPECT_THAT(refuses("scaler", {{"scale", 2.0}}), HasSubstr("while loading 'scaler'"));

  auto other = state;
  other.erase("scaler");
  other["more"] = to_object(StateDict{});
  EXPECT_THAT(message_of<c10::Error>([&] { fresh.state.load_state_dict(other); }),
              HasSubstr("TrainingState:\n\tMissing key(s) in state_dict: \"scaler\". "
                        "\n\tUnexpected key(s) in state_dict: \"more\". "));
  const auto keys = fresh.state.load_state_dict(other, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("scaler"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("more"));
  EXPECT_EQ(fresh.schedule.last_epoch(), 1);
}

TEST(TrainingState, NamesArePartsOwn) {
  Net net;
  TrainingState state;
  state.add_model("model", net);
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_model("model", net); }),
              HasSubstr("'model' already"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_model("", net); }), HasSubstr("needs a name"));
  state.add_rng();
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_rng(); }), HasSubstr("already"));
}

TEST(RngState, AnotherNumberOfRanksDrawsOtherNumbers) {
  torch::manual_seed(7);
  const at::Tensor first = at::rand({4});
  TrainingState state;
  state.add_rng();
  const auto shared = state.state_dict();
  const auto drawn = [&](int64_t rank, int64_t ranks) {
    derive_rng_state(from_object<StateDict>(shared.at("rng")).at("fingerprint").toInt(), rank, ranks);
    return at::rand({4});
  };
  std::vector<at::Tensor> all{first, drawn(0, 2), drawn(1, 2), drawn(0, 3), drawn(2, 3)};
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(at::equal(all[i], all[j])) << i << ", " << j;
  }
  EXPECT_TRUE(at::equal(drawn(1, 2), all[2]));

  torch::manual_seed(7);
  state.load_state_dict(shared);
  state.load_rank_state_dict({});  // alone: rank 0 of 1
  const at::Tensor derived = at::rand({4});
  EXPECT_TRUE(at::equal(derived, drawn(0, 1)));

  const at::Tensor before = get_rng_state().at("cpu").toTensor();
  for (const c10::IValue& wrong :
       {c10::IValue(3), c10::IValue(at::ones({5}, at::kByte)), c10::IValue(at::ones({5056}, at::kByte))}) {
    message_of<c10::ValueError>([&] { set_rng_state({{"cpu", wrong}}); });
    EXPECT_TRUE(at::equal(get_rng_state().at("cpu").toTensor(), before));
  }
}

}  // namespace
}  // namespace lockstep::training_state_test

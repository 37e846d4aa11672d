#include <algorithm>
#include <chrono>
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>

// States of pipelines' stages, saved and loaded by other stages.
namespace lockstep::pipeline_states_test {
namespace {

using namespace pipeline_test;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr int64_t kLayers = 9, kMicroBatches = 4, kSteps = 3;

/// With buffers, and a layer that is there twice. No bias before the BatchNorm: its gradient would be rounding errors, which
/// Adam scales up.
nn::Sequential make_model() {
  torch::manual_seed(5);
  nn::Linear shared(6, 6);
  nn::Sequential model(shared, nn::Tanh(), nn::Linear(nn::LinearOptions(6, 8).bias(false)),
                       nn::BatchNorm1d(8), nn::Tanh(), nn::Linear(8, 6),
                       nn::LayerNorm(nn::LayerNormOptions({6})), shared, nn::Linear(6, 6));
  model->to(at::kDouble);
  return model;
}

Batch batch_of(int64_t step) {
  return random_batch(static_cast<uint64_t>(2 * step), 9, at::kDouble);
}

/// What trains: all of the model in one process, or stages.
struct Form {
  int ranks = 1;
  int64_t stages_per_rank = 0;  // 0: one process without a pipeline
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
};

std::vector<int64_t> random_balance(int64_t stages, std::mt19937_64& random) {
  std::vector<int64_t> inner(kLayers - 1);
  for (size_t i = 0; i < inner.size(); ++i) inner[i] = static_cast<int64_t>(i) + 1;
  std::shuffle(inner.begin(), inner.end(), random);
  std::set<int64_t> cuts(inner.begin(), inner.begin() + stages - 1);
  cuts.insert(kLayers);
  std::vector<int64_t> balance;
  int64_t last = 0;
  for (const int64_t cut : cuts) balance.push_back(cut - std::exchange(last, cut));
  return balance;
}

template <class Optimizer, class Options>
class Training {
 public:
  Training(const Form& form, const std::vector<int64_t>& balance, const Options& options) {
    Tensors parameters = model_->parameters();
    if (form.stages_per_rank > 0) {
      stages_ = pipeline_stages(model_, balance);
      parameters.clear();
      for (const PipelineStage& stage : stages_) {
        parameters.insert(parameters.end(), stage.parameters().begin(), stage.parameters().end());
      }
    }
    optimizer_ = std::make_unique<Optimizer>(each_once(parameters), options);
    if (stages_.empty()) return;
    runner_ = std::make_unique<PipelineRunner>(
        stages_, PipelineOptions{
                     .schedule = form.schedule, .n_microbatches = kMicroBatches, .loss_fn = mean_of_squares});
  }

  void add_to(TrainingState& state, const std::string& name) {
    if (runner_) {
      state.add_model(name, stages_);
      state.add_optimizer(name + " optimizer", *optimizer_, stages_);
    } else {
      state.add_model(name, model_);
      state.add_optimizer(name + " optimizer", *optimizer_, model_);
    }
  }

  void train(int64_t from) {
    for (int64_t step = from; step < from + kSteps; ++step) {
      const Batch batch = batch_of(step);
      optimizer_->zero_grad();
      if (runner_) {
        runner_->step({batch.data}, batch.target);
      } else {
        std::vector<nn::Sequential> whole{model_};
        run_as_one_process(whole, batch, kMicroBatches);
      }
      optimizer_->step();
    }
  }

  void expect_equals(const nn::Sequential& expected) const {
    const auto compare = [&](const std::string& name, const at::Tensor& value) {
      const auto parameters = expected->named_parameters(), buffers = expected->named_buffers();
      const auto* wanted = parameters.contains(name) ? &parameters[name] : &buffers[name];
      EXPECT_LT(testing::difference(value.to(at::kDouble), wanted->to(at::kDouble)), 1e-11) << name;
    };
    if (!runner_) {
      for (const auto& item : model_->named_parameters()) compare(item.key(), item.value());
      for (const auto& item : model_->named_buffers()) compare(item.key(), item.value());
    }
    for (const PipelineStage& stage : stages_) {
      for (const auto& [name, value] : stage.named_parameters()) compare(name, value);
      for (const auto& [name, value] : stage.named_buffers()) compare(name, value);
    }
  }
  const nn::Sequential& model() const { return model_; }

 private:
  nn::Sequential model_ = make_model();
  std::vector<PipelineStage> stages_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<PipelineRunner> runner_;
};

using WithSgd = Training<torch::optim::SGD, torch::optim::SGDOptions>;
using WithAdam = Training<torch::optim::Adam, torch::optim::AdamOptions>;
using WithAdamW = Training<torch::optim::AdamW, torch::optim::AdamWOptions>;

struct Trainings {
  Trainings(const Form& form, const std::vector<int64_t>& balance)
      : sgd(form, balance, torch::optim::SGDOptions(0.05).momentum(0.9)),
        adam(form, balance, torch::optim::AdamOptions(0.01).amsgrad(true)),
        adamw(form, balance, torch::optim::AdamWOptions(0.01)) {
    sgd.add_to(state, "sgd");
    adam.add_to(state, "adam");
    adamw.add_to(state, "adamw");
  }
  void train(int64_t from) { sgd.train(from), adam.train(from), adamw.train(from); }

  WithSgd sgd;
  WithAdam adam;
  WithAdamW adamw;
  TrainingState state;
};

TEST(PipelineStates, AnySplitGoesOnFromAnyOther) {
  const std::vector<Form> forms{
      {.ranks = 1},
      {.ranks = 2, .stages_per_rank = 1},
      {.ranks = 3, .stages_per_rank = 1, .schedule = PipelineSchedule::kGPipe},
      {.ranks = 2, .stages_per_rank = 2, .schedule = PipelineSchedule::kInterleaved1F1B}};
  std::mt19937_64 random(25);  // the same in all processes
  const auto balance_of = [&](const Form& form) {
    return form.stages_per_rank == 0 ? std::vector<int64_t>{}
                                     : random_balance(form.ranks * form.stages_per_rank, random);
  };
  for (size_t writer = 0; writer < forms.size(); ++writer) {
    const testing::SharedFolder folder;
    const testing::RunRanksOptions options{.environment = folder.environment()};
    const auto path = folder.path() / "step";
    const auto written = balance_of(forms[writer]);
    run_ranks(
        forms[writer].ranks,
        [&](int) {
          auto world = init_process_group();
          Trainings trainings(forms[writer], written);
          trainings.train(0);
          save_checkpoint(path, trainings.state.state_dict(), {}, {.step = kSteps});
        },
        options);
    for (const size_t next : {1, 2}) {
      const Form& reader = forms[(writer + next) % forms.size()];
      const auto read = balance_of(reader);
      run_ranks(
          reader.ranks,
          [&](int) {
            SCOPED_TRACE("written by " + c10::str(at::IntArrayRef(written)) + ", read by " +
                         c10::str(at::IntArrayRef(read)));
            auto world = init_process_group();
            Trainings resumed(reader, read), undisturbed(forms[0], {});
            const auto keys = resumed.state.load_state_dict(load_checkpoint(path).state);
            EXPECT_TRUE(keys.missing_keys.empty() && keys.unexpected_keys.empty());
            resumed.train(kSteps);
            undisturbed.train(0);
            undisturbed.train(kSteps);
            resumed.sgd.expect_equals(undisturbed.sgd.model());
            resumed.adam.expect_equals(undisturbed.adam.model());
            resumed.adamw.expect_equals(undisturbed.adamw.model());
          },
          options);
    }
  }
}

StateDict part_of(const StateDict& state, const std::string& name) {
  return from_object<StateDict>(state.at(name));
}

TEST(PipelineStates, WhatDoesNotFitOnOneRankChangesNothingOnAny) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    // Of one process.
    WithAdam whole({}, {}, torch::optim::AdamOptions(0.01));
    whole.train(0);
    TrainingState of_whole;
    whole.add_to(of_whole, "net");
    const StateDict saved = of_whole.state_dict();

    WithAdam pipeline({.ranks = 2, .stages_per_rank = 1}, {4, 5}, torch::optim::AdamOptions(0.01));
    TrainingState state;
    pipeline.add_to(state, "net");
    const auto refuse = [&](const StateDict& changed, const auto& text) {
      EXPECT_THAT(message_of<c10::Error>([&] { state.load_state_dict(changed); }), text);
      pipeline.expect_equals(make_model());
      EXPECT_TRUE(part_of(part_of(state.state_dict(), "net optimizer"), "state").empty());
    };
    {
      StateDict model = part_of(saved, "net"), changed = saved;
      model.erase("2.weight");  // of rank 0
      model["9.weight"] = at::zeros({1});
      changed["net"] = to_object(model);
      refuse(changed, AllOf(HasSubstr("Missing key(s) in state_dict: \"2.weight\""),
                            HasSubstr("Unexpected key(s) in state_dict: \"9.weight\"")));
    }
    {
      StateDict model = part_of(saved, "net"), changed = saved;
      model["8.weight"] = at::zeros({2, 6});  // of rank 1
      changed["net"] = to_object(model);
      refuse(changed, AllOf(HasSubstr("on rank 1"), HasSubstr("size mismatch for 8.weight")));
    }
    {
      StateDict optimizer = part_of(saved, "net optimizer"), changed = saved;
      auto states = part_of(optimizer, "state");
      auto of_weight = part_of(states, "5.weight");  // of rank 1
      of_weight.erase("exp_avg");
      states["5.weight"] = to_object(of_weight);
      optimizer["state"] = to_object(states);
      changed["net optimizer"] = to_object(optimizer);
      refuse(changed, AllOf(HasSubstr("on rank 1"), HasSubstr("the state of \"5.weight\"")));
    }
    {
      StateDict optimizer = part_of(saved, "net optimizer"), changed = saved;
      auto groups = from_object<std::vector<StateDict>>(optimizer.at("param_groups"));
      auto names = from_object<std::vector<std::string>>(groups.front().at("params"));
      std::replace(names.begin(), names.end(), std::string("2.weight"), std::string("other.weight"));
      groups.front()["params"] = to_object(names);
      optimizer["param_groups"] = to_object(groups);
      changed["net optimizer"] = to_object(optimizer);
      refuse(changed,
             AllOf(HasSubstr("Missing key(s) in state_dict: \"2.weight\""), HasSubstr("other.weight")));
      // A renaming mends it.
      state.load_state_dict(changed, {.key_map = {rename_keys({{"other.weight", "2.weight"}})}});
      pipeline.expect_equals(whole.model());
    }
  });
}

TEST(PipelineStates, AnotherPartThatDoesNotFitOnOneRankKeepsAllFromLoading) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    WithAdam whole({}, {}, torch::optim::AdamOptions(0.01));
    whole.train(0);
    nn::Linear head(2, 2);
    TrainingState of_whole;
    of_whole.add_model("head", head);
    whole.add_to(of_whole, "net");

    WithAdam pipeline({.ranks = 2, .stages_per_rank = 1}, {4, 5}, torch::optim::AdamOptions(0.01));
    nn::Linear own_head(2, rank == 0 ? 3 : 2);
    TrainingState state;
    state.add_model("head", own_head);  // before the pipeline, whose ranks check together
    pipeline.add_to(state, "net");
    const auto load = [&] { state.load_state_dict(of_whole.state_dict()); };
    const char* cause = "size mismatch for weight";
    if (rank == 0) {
      EXPECT_THAT(message_of<c10::Error>(load), HasSubstr(cause));
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>(load), AllOf(HasSubstr("rank 0: "), HasSubstr(cause)));
    }
    pipeline.expect_equals(make_model());
  });
}

TEST(PipelineStates, ARankKilledWhileStatesAreGatheredOrLoadedIsNamed) {
  constexpr int kVictim = 1;
  for (int operation = 1; operation <= 13; operation += 2) {
    const std::string death = "announce=kill(9)@" + std::to_string(operation);
    SCOPED_TRACE(death);
    testing::run_survivors(3, {kVictim}, [&](int rank) {
      auto world = init_process_group();
      WithAdam pipeline({.ranks = 3, .stages_per_rank = 1}, {3, 3, 3}, torch::optim::AdamOptions(0.01));
      pipeline.train(0);
      const auto text = message_of<c10::Error>([&] {
        if (rank == kVictim) failpoint::configure(death);
        TrainingState state;
        pipeline.add_to(state, "net");
        state.load_state_dict(state.state_dict(), {.strict = false});
        if (rank == kVictim) testing::die();
        barrier();
      });
      EXPECT_THAT(text, ::testing::ContainsRegex("rank 1 \\(pid [0-9]+[^)]*\\) (was )?killed by signal 9"));
      shrink_group();  // until here no survivor ends, so that none is told by that
    });
  }
}

TEST(PipelineStates, ARankWithoutStagesIsNamedOnAll) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<PipelineStage> stages;
    if (rank == 0) stages.emplace_back(nn::Linear(2, 2), 0, 2);
    TrainingState state;
    EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_model("model", stages); }),
                HasSubstr("on rank 1, it has no stage"));
  });
}

/// A rank that has no state of a part, or something else, takes part in the checks of the others.
TEST(PipelineStates, APartThatIsNotInTheStateOfOneRankKeepsAllFromLoading) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group({.timeout = std::chrono::seconds(60)});
    WithAdam whole({}, {}, torch::optim::AdamOptions(0.01));
    whole.train(0);
    TrainingState of_whole;
    whole.add_to(of_whole, "net");
    of_whole.add_rng();
    const StateDict saved = of_whole.state_dict();

    WithAdam pipeline({.ranks = 2, .stages_per_rank = 1}, {4, 5}, torch::optim::AdamOptions(0.01));
    TrainingState state;
    pipeline.add_to(state, "net");
    state.add_rng();
    const auto refuse = [&](const StateDict& given, bool strict) {
      const auto text = message_of<c10::Error>([&] { state.load_state_dict(given, {.strict = strict}); });
      EXPECT_THAT(text, HasSubstr(rank == 0 ? "rank 1" : "TrainingState"));
      pipeline.expect_equals(make_model());
      EXPECT_TRUE(part_of(part_of(state.state_dict(), "net optimizer"), "state").empty());
    };
    for (const std::string part : {"net", "net optimizer"}) {
      StateDict given = saved;
      if (rank == 1) given.erase(part);
      for (const bool strict : {true, false}) refuse(given, strict);
    }
    for (const std::string part : {"net", "net optimizer", "rng"}) {
      StateDict given = saved;
      if (rank == 1) given[part] = "no state";
      refuse(given, true);
    }
    // What no rank has is left out.
    StateDict rest = saved;
    rest.erase("net optimizer");
    const auto keys = state.load_state_dict(rest, {.strict = false});
    EXPECT_THAT(keys.missing_keys, ::testing::ElementsAre("net optimizer"));
    pipeline.expect_equals(whole.model());
    state.load_state_dict(saved);
    EXPECT_FALSE(part_of(part_of(state.state_dict(), "net optimizer"), "state").empty());
  });
}

}  // namespace
}  // namespace lockstep::pipeline_states_test

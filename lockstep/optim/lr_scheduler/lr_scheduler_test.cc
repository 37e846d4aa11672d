#include <cmath>
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/swa_utils.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// The numbers are compared with Python's in lr_scheduler_test.py; here are errors, warnings and neighbours.
namespace lockstep::lr_scheduler::lr_scheduler_test {
namespace {

namespace optim = torch::optim;
using lockstep::testing::message_of;
using lockstep::testing::run_ranks;
using swa_utils::SWALR;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

torch::Tensor parameter() {
  auto tensor = torch::ones({2}, torch::kDouble).requires_grad_();
  tensor.mutable_grad() = torch::ones({2}, torch::kDouble);
  return tensor;
}

/// Two groups, with learning rates 0.1 and 0.2.
template <class Options>
std::vector<optim::OptimizerParamGroup> two_groups(Options options) {
  std::vector<optim::OptimizerParamGroup> groups;
  for (const double value : {0.1, 0.2}) {
    options.lr(value);
    groups.emplace_back(std::vector{parameter()}, std::make_unique<Options>(options));
  }
  return groups;
}

struct SchedulerTest : ::testing::Test {
  optim::SGD optimizer{two_groups(optim::SGDOptions(0.5).momentum(0.9)),
                       optim::SGDOptions(0.5).momentum(0.9)};

  std::vector<double> lrs() {
    std::vector<double> answer;
    for (auto& group : optimizer.param_groups()) answer.push_back(group.options().get_lr());
    return answer;
  }
  template <class Action>
  static std::string error(Action action) {
    return message_of<c10::ValueError>(action);
  }
  template <class Action>
  static std::string logged(Action action) {
    ::testing::internal::CaptureStderr();
    action();
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(SchedulerTest, ASecondSchedulerKnowsTheLearningRatesFromBeforeTheFirst) {
  {
    ConstantLR first(optimizer, 0.5);
    EXPECT_THAT(lrs(), ElementsAre(0.05, 0.1));
    ExponentialLR second(optimizer, 0.9);
    EXPECT_THAT(second.base_lrs(), ElementsAre(0.1, 0.2));
    EXPECT_THAT(second.get_last_lr(), ElementsAre(0.05, 0.1));
  }
  // With the last scheduler the note goes, and another optimizer never had it.
  ExponentialLR later(optimizer, 0.9);
  EXPECT_THAT(later.base_lrs(), ElementsAre(0.05, 0.1));
  optim::SGD other(two_groups(optim::SGDOptions(0.5)), optim::SGDOptions(0.5));
  EXPECT_THAT(ExponentialLR(other, 0.9).base_lrs(), ElementsAre(0.1, 0.2));
}

TEST_F(SchedulerTest, WarnsOfAStepBeforeTheOptimizers) {
  optim::AdamW adam(two_groups(optim::AdamWOptions(0.5)), optim::AdamWOptions(0.5));
  StepLR schedule(adam, 3);
  const std::string early = logged([&] { schedule.step(); });
  EXPECT_THAT(early, HasSubstr("`StepLR::step()` before `optimizer.step()`"));
  EXPECT_EQ(logged([&] { schedule.step(); }), "");  // once

  StepLR other(adam, 3);
  adam.step();
  EXPECT_EQ(logged([&] { other.step(); }), "");
}

TEST_F(SchedulerTest, DoesNotWarnWhereStepsCannotBeSeen) {
  StepLR schedule(optimizer, 3);
  optimizer.step();
  EXPECT_EQ(logged([&] { schedule.step(); }), "");
}

TEST_F(SchedulerTest, WarnsOfEpochsOnceInAProcess) {
  run_ranks(1, [&](int /*rank*/) {
    StepLR schedule(optimizer, 3, 0.5);
    EXPECT_THAT(logged([&] { schedule.step(7); }), HasSubstr("The epoch parameter"));
    EXPECT_EQ(logged([&] { schedule.step(10); }), "");
    EXPECT_THAT(lrs(), ElementsAre(0.1 * 0.125, 0.2 * 0.125));
    EXPECT_THAT(error([&] { schedule.step(1.5); }), HasSubstr("1.5 is not a whole number"));
  });
}

TEST_F(SchedulerTest, RefusesWhatPythonRefuses) {
  const LrLambda one = [](int64_t) { return 1.0; };
  EXPECT_THAT(error([&] { LambdaLR(optimizer, std::vector{one}); }),
              HasSubstr("Expected 2 lr_lambdas, but got 1"));
  EXPECT_THAT(error([&] { LambdaLR(optimizer, LrLambda()); }), HasSubstr("is empty"));
  EXPECT_THAT(error([&] { MultiplicativeLR(optimizer, {one, one, one}); }), HasSubstr("but got 3"));
  EXPECT_THAT(error([&] { StepLR(optimizer, 0); }), HasSubstr("step_size is 0"));
  EXPECT_THAT(error([&] { ConstantLR(optimizer, 1.5); }), HasSubstr("between 0 and 1, got 1.5"));
  EXPECT_THAT(error([&] { ConstantLR(optimizer, NAN); }), HasSubstr("between 0 and 1, got nan"));
  EXPECT_THAT(error([&] { LinearLR(optimizer, 0.0); }),
              HasSubstr("greater than 0 and less or equal to 1, got 0"));
  EXPECT_THAT(error([&] { LinearLR(optimizer, 0.5, -0.1); }), HasSubstr("between 0 and 1, got -0.1"));
  EXPECT_THAT(error([&] { CosineAnnealingLR(optimizer, 0); }), HasSubstr("T_max is 0"));
  EXPECT_THAT(error([&] { CosineAnnealingWarmRestarts(optimizer, 0); }), HasSubstr("T_0, but got 0"));
  EXPECT_THAT(error([&] { CosineAnnealingWarmRestarts(optimizer, 5, 0); }),
              HasSubstr("T_mult >= 1, but got 0"));
  EXPECT_THAT(error([&] { CosineAnnealingWarmRestarts(optimizer, 5).step(-1); }),
              HasSubstr("non-negative epoch, but got -1"));
  EXPECT_THAT(error([&] { CyclicLR(optimizer, {0.1}, 0.2); }),
              HasSubstr("base_lr must have the same length as optimizer.param_groups. base_lr has 1 values, "
                        "param_groups has 2."));
  EXPECT_THAT(error([&] { CyclicLR(optimizer, 0.1, 0.2, {.mode = "square"}); }), HasSubstr("'square'"));
  EXPECT_THAT(error([&] { CyclicLR(optimizer, 0.1, 0.2, {.step_size_up = 0}); }),
              HasSubstr("step_size_up is 0"));
  EXPECT_THAT(error([&] { OneCycleLR(optimizer, 0.1); }), HasSubstr("either total_steps OR"));
  EXPECT_THAT(error([&] { OneCycleLR(optimizer, 0.1, {.total_steps = 0}); }),
              HasSubstr("total_steps, but got 0"));
  EXPECT_THAT(error([&] { OneCycleLR(optimizer, 0.1, {.epochs = -1, .steps_per_epoch = 2}); }),
              HasSubstr("epochs, but got -1"));
  EXPECT_THAT(error([&] { OneCycleLR(optimizer, 0.1, {.total_steps = 9, .pct_start = 1.1}); }),
              HasSubstr("pct_start, but got 1.1"));
  EXPECT_THAT(error([&] { OneCycleLR(optimizer, 0.1, {.total_steps = 9, .anneal_strategy = "sine"}); }),
              HasSubstr("instead got sine"));
  EXPECT_THAT(error([&] { SWALR(optimizer, {0.1, 0.2, 0.3}); }), HasSubstr("swa_lr has 3 values"));
  EXPECT_THAT(error([&] { SWALR(optimizer, 0.1, -1); }), HasSubstr("got -1"));
  EXPECT_THAT(error([&] { SWALR(optimizer, 0.1, 3, "exp"); }), HasSubstr("instead got exp"));
  EXPECT_THAT(error([&] { ReduceLROnPlateau(optimizer, {.factor = 1.0}); }), HasSubstr("< 1.0, got 1"));
  EXPECT_THAT(error([&] { ReduceLROnPlateau(optimizer, {.mode = "best"}); }),
              HasSubstr("mode best is unknown!"));
  EXPECT_THAT(error([&] { ReduceLROnPlateau(optimizer, {.threshold_mode = "x"}); }),
              HasSubstr("mode x is unknown!"));
  EXPECT_THAT(error([&] {
                ReduceLROnPlateau(optimizer, {.min_lr = {0.1, 0.1, 0.1}});
              }),
              HasSubstr("3 values"));
}

TEST_F(SchedulerTest, RefusesPartsThatDoNotFit) {
  optim::SGD other(two_groups(optim::SGDOptions(0.5)), optim::SGDOptions(0.5));
  const auto step = std::make_shared<StepLR>(optimizer, 3);
  const auto of_other = std::make_shared<ConstantLR>(other, 0.5);
  const auto chain = std::make_shared<ChainedScheduler>(Schedulers{step});
  EXPECT_THAT(error([&] { SequentialLR(optimizer, {}, {}); }), HasSubstr("got no scheduler"));
  EXPECT_THAT(error([&] { ChainedScheduler(Schedulers{}); }), HasSubstr("got no scheduler"));
  EXPECT_THAT(error([&] { SequentialLR(optimizer, {step, nullptr}, {5}); }), HasSubstr("index 1 is null"));
  EXPECT_THAT(error([&] {
                SequentialLR(optimizer, {step, of_other}, {5});
              }),
              HasSubstr("ConstantLR at index 1"));
  EXPECT_THAT(error([&] { ChainedScheduler({step, of_other}); }), HasSubstr("ConstantLR at index 1"));
  EXPECT_THAT(error([&] { ChainedScheduler({step}, &other); }), HasSubstr("StepLR at index 0"));
  EXPECT_THAT(error([&] {
                SequentialLR(optimizer, {step, step}, {5, 6});
              }),
              HasSubstr("number of schedulers 2 and the number of milestones to be equal to 2"));
  EXPECT_THAT(error([&] {
                SequentialLR(optimizer, {step, chain}, {5});
              }),
              HasSubstr("ChainedScheduler at index 1"));
  LRScheduler& base = *chain;
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { base.step(3); }), HasSubstr("takes no epoch"));
}

TEST_F(SchedulerTest, WithoutMomentumThereIsNothingToCycle) {
  optim::Adagrad adagrad(std::vector{parameter()}, optim::AdagradOptions(0.1));
  EXPECT_THAT(error([&] { CyclicLR(adagrad, 0.1, 0.2); }), HasSubstr("must support momentum or beta1"));
  EXPECT_THAT(error([&] { OneCycleLR(adagrad, 0.1, {.total_steps = 9}); }),
              HasSubstr(".cycle_momentum = false"));
  CyclicLR schedule(adagrad, 0.1, 0.2, {.step_size_up = 2, .cycle_momentum = false});
  schedule.step();
  EXPECT_DOUBLE_EQ(schedule.get_last_lr()[0], 0.15);
}

TEST_F(SchedulerTest, ALearningRateIsNeverNaN) {
  ConstantLR schedule(optimizer, 0.0, /*total_iters=*/1);
  EXPECT_THAT(error([&] { schedule.step(); }), HasSubstr("param_groups[0] in epoch 1 would be NaN"));
  EXPECT_THAT(lrs(), ElementsAre(0, 0));
  EXPECT_THAT(error([&] { PolynomialLR(optimizer, 0).step(1); }), HasSubstr("would be NaN"));
  EXPECT_THAT(error([&] { OneCycleLR(optimizer, 0.1, {.total_steps = 10, .pct_start = 0.1}); }),
              HasSubstr("would be NaN"));
}

TEST_F(SchedulerTest, AOneCycleEnds) {
  OneCycleLR schedule(optimizer, 0.1, {.total_steps = 3});
  for (int step = 0; step < 3; ++step) schedule.step();
  EXPECT_THAT(error([&] { schedule.step(); }), HasSubstr("Tried to step 4 times"));
}

TEST_F(SchedulerTest, AddedGroupsGoAlongOrAreAnError) {
  StepLR steps(optimizer, 1, 0.5);
  CosineAnnealingWarmRestarts restarts(optimizer, 5);
  LambdaLR lambda(optimizer, [](int64_t) { return 1.0; });
  OneCycleLR cycle(optimizer, 0.1, {.total_steps = 9});
  SWALR swa(optimizer, 0.1);
  ReduceLROnPlateau plateau(optimizer, {.factor = 0.5, .patience = 0});
  ReduceLROnPlateau strict(optimizer, {.patience = 0, .min_lr = {0.0, 0.0}});
  optimizer.add_param_group({std::vector{parameter()}, std::make_unique<optim::SGDOptions>(0.7)});
  const auto before = lrs();
  steps.step();
  EXPECT_THAT(lrs(), ElementsAre(before[0] / 2, before[1] / 2, 0.35));
  for (LRScheduler* schedule : std::initializer_list<LRScheduler*>{&restarts, &lambda, &cycle, &swa}) {
    EXPECT_THAT(error([&] { schedule->step(); }),
                HasSubstr("made for 2 parameter groups, but the optimizer has 3"));
  }
  plateau.step(1);
  plateau.step(1);
  EXPECT_DOUBLE_EQ(lrs()[2], 0.175);
  strict.step(1);
  EXPECT_THAT(error([&] { strict.step(1); }),
              HasSubstr("differs from when `ReduceLROnPlateau` was initialized (2)"));
  EXPECT_EQ(StepLR(optimizer, 1).base_lrs().size(), 3U);  // a new one knows all
}

TEST_F(SchedulerTest, AStateFromBeforeTheAveragingLeavesSWALRWithoutItsRate) {
  const auto state = state_dict(optimizer);
  SWALR swa(optimizer, 0.5);
  swa.step();
  load_state_dict(optimizer, state);
  EXPECT_THAT(error([&] { swa.step(); }), HasSubstr("SWALR: param_groups[0] has no 'swa_lr'"));
  EXPECT_THAT(lrs(), ElementsAre(0.1, 0.2));
}

TEST_F(SchedulerTest, LastEpochWantsInitialLearningRates) {
  EXPECT_THAT(
      error([&] { StepLR(optimizer, 3, 0.1, /*last_epoch=*/4); }),
      ::testing::AllOf(HasSubstr("param_groups[0]"), HasSubstr("InitialLr"), HasSubstr("load_state_dict")));
  EXPECT_THAT(error([&] { InitialLr(optimizer, {0.1}); }), HasSubstr("initial_lr has 1 values"));
  const InitialLr initial_lr(optimizer, {0.8, 0.4});
  EXPECT_THAT(StepLR(optimizer, 3, 0.5, /*last_epoch=*/5).get_last_lr(), ElementsAre(0.05, 0.1));
  // A one-cycle schedule knows them from its arguments.
  EXPECT_GT(OneCycleLR(optimizer, 0.3, {.total_steps = 10, .last_epoch = 2}).get_last_lr()[0], 0.2);
}

TEST_F(SchedulerTest, AStateThatDoesNotFitChangesNothing) {
  StepLR schedule(optimizer, 3, 0.5);
  schedule.step();
  const StateDict good = schedule.state_dict();
  StateDict state = good;
  state.erase("gamma");
  EXPECT_THAT(error([&] { schedule.load_state_dict(state); }),
              HasSubstr("StepLR::load_state_dict: the state has no 'gamma'"));
  state = good;
  state["step_size"] = 99;
  state["_last_lr"] = to_object(std::vector{0.1});
  EXPECT_THAT(error([&] { schedule.load_state_dict(state); }),
              HasSubstr("the state has 1 values of '_last_lr', this scheduler has 2"));
  EXPECT_EQ(from_object<int64_t>(schedule.state_dict()["step_size"]), 3);
  state = good;
  state["last_epoch"] = "three";
  EXPECT_THAT(error([&] { schedule.load_state_dict(state); }), HasSubstr("in 'last_epoch'"));
  state = good;
  state["gamma"] = 0.25;  // hyperparameters come with it
  state["of another version"] = true;
  schedule.load_state_dict(state);
  EXPECT_EQ(from_object<double>(schedule.state_dict()["gamma"]), 0.25);

  LambdaLR lambda(optimizer, [](int64_t) { return 1.0; });
  state = lambda.state_dict();
  state["lr_lambdas"] = to_object(std::vector<StateDict>{{{"decay", 0.5}}, {}});
  EXPECT_THAT(error([&] { lambda.load_state_dict(state); }), HasSubstr("attributes of a Python object"));
  CyclicLR cyclic(optimizer, 0.1, 0.2);
  state = cyclic.state_dict();
  state["_scale_fn_custom"] = to_object(StateDict{{"decay", 0.5}});
  EXPECT_THAT(error([&] { cyclic.load_state_dict(state); }), HasSubstr("'_scale_fn_custom'"));
  ChainedScheduler chain({std::make_shared<StepLR>(optimizer, 3)});
  ChainedScheduler longer({std::make_shared<StepLR>(optimizer, 3), std::make_shared<StepLR>(optimizer, 2)});
  EXPECT_THAT(error([&] { chain.load_state_dict(longer.state_dict()); }),
              HasSubstr("has 2 schedulers, this has 1"));
  ReduceLROnPlateau plateau(optimizer);
  state = plateau.state_dict();
  state["mode"] = "worst";
  EXPECT_THAT(error([&] { plateau.load_state_dict(state); }), HasSubstr("mode worst is unknown!"));
}

/// As a user would write one.
class SquareRootLR final : public LRScheduler {
 public:
  explicit SquareRootLR(optim::Optimizer& optimizer) : LRScheduler(optimizer, "SquareRootLR", -1) {
    initial_step();
  }

 private:
  std::vector<double> get_lr() override {
    return scaled_base_lrs(1 / std::sqrt(1.0 + static_cast<double>(last_epoch_)));
  }
};

TEST_F(SchedulerTest, ASchedulerOfOnesOwnIsAPartOfOthers) {
  SequentialLR schedule(
      optimizer,
      {std::make_shared<ConstantLR>(optimizer, 0.5, 100), std::make_shared<SquareRootLR>(optimizer)}, {2});
  optimizer.step();
  for (int step = 0; step < 5; ++step) schedule.step();
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.05, 0.1));
}

/// The learning rates that the optimizer within an optimizer has used.
std::vector<double> lrs_of(const optim::Optimizer& optimizer) {
  std::vector<double> answer;
  for (const auto& group : optimizer.param_groups()) answer.push_back(group.options().get_lr());
  return answer;
}

TEST(SchedulersOfWrappers, LeadTheLocalOptimizersOnEveryRank) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    ZeroRedundancyOptimizer zero(two_groups(optim::AdamWOptions(0.5)),
                                 optimizer_class<optim::AdamW>(optim::AdamWOptions(0.5)));
    OneCycleLR cycle(zero, {0.3, 0.6}, {.total_steps = 20});
    PostLocalSGDOptimizer local(
        std::make_unique<optim::SGD>(two_groups(optim::SGDOptions(0.5)), optim::SGDOptions(0.5)),
        std::make_shared<PeriodicModelAverager>(2));
    SequentialLR sequence(
        local,
        {std::make_shared<LinearLR>(local, 0.1, 1.0, 4), std::make_shared<CosineAnnealingLR>(local, 10)},
        {4});
    ::testing::internal::CaptureStderr();
    for (int step = 0; step < 9; ++step) {
      const auto zero_lrs = cycle.get_last_lr();
      const auto local_lrs = sequence.get_last_lr();
      zero.step();
      local.step();
      EXPECT_EQ(lrs_of(zero.optim()), zero_lrs);
      EXPECT_EQ(lrs_of(local.optim()), local_lrs);
      const auto& options = static_cast<const optim::AdamWOptions&>(zero.optim().param_groups()[0].options());
      // The momentum goes down from 0.95.
      EXPECT_EQ(step == 0, std::get<0>(options.betas()) > 0.95 - 1e-12);
      cycle.step();
      sequence.step();
    }
    // Each rank's parameters have changed, its own and the other's, so no rank is warned.
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "rank " << rank;
    EXPECT_NEAR(sequence.get_last_lr()[1], 0.1, 1e-12);  // half of the cosine
  });
}

}  // namespace
}  // namespace lockstep::lr_scheduler::lr_scheduler_test

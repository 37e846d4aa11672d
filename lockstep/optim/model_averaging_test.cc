#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/optim/model_averaging.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::model_averaging_test {
namespace {

namespace optim = torch::optim;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using Tensors = std::vector<torch::Tensor>;

/// A parameter that is this rank's number, with a gradient.
torch::Tensor own_number(at::IntArrayRef sizes = {2, 3}, at::ScalarType type = at::kDouble) {
  auto parameter = torch::full(sizes, get_rank(), type).requires_grad_();
  parameter.mutable_grad() = torch::ones_like(parameter).detach();
  return parameter;
}

double value_of(const torch::Tensor& parameter) {
  const auto value = parameter.detach().flatten()[0];
  EXPECT_TRUE((parameter.detach() == value).all().item<bool>());
  return value.item<double>();
}

TEST(AverageParameters, AveragesThoseWithGradientsInPlace) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto matrix = own_number({4, 3});
    const auto transposed = own_number({3, 2}).detach().t();
    const auto small = own_number({5}, at::kFloat);
    const auto frozen = torch::full({2}, rank, at::kDouble);
    auto* memory = matrix.data_ptr();
    average_parameters({matrix, transposed, small});
    EXPECT_EQ(value_of(matrix), 1);
    EXPECT_EQ(value_of(transposed), 1);
    EXPECT_NEAR(value_of(small), 1, 1e-6);
    EXPECT_EQ(small.scalar_type(), at::kFloat);
    EXPECT_EQ(matrix.data_ptr(), memory);
    EXPECT_TRUE(matrix.is_leaf() && matrix.requires_grad());
    // Without a gradient a parameter is left alone, in lists and in groups.
    const auto other = own_number();
    average_parameters_or_parameter_groups(Tensors{frozen, other});
    EXPECT_EQ(value_of(frozen), rank);
    EXPECT_EQ(value_of(other), 1);
    const auto third = own_number();
    average_parameters_or_parameter_groups(
        std::vector<optim::OptimizerParamGroup>{{Tensors{frozen}}, {Tensors{third}}});
    EXPECT_EQ(value_of(frozen), rank);
    EXPECT_EQ(value_of(third), 1);
    // Non-members do nothing.
    const auto pair = new_group({0, 2});
    const auto fourth = own_number();
    average_parameters({fourth}, pair);
    EXPECT_EQ(value_of(fourth), 1);
    average_parameters({});
  });
}

TEST(PeriodicModelAverager, AveragesEveryPeriodAfterTheWarmUp) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    PeriodicModelAverager averager(3, /*warmup_steps=*/2);
    for (int step = 0; step < 12; ++step) {
      EXPECT_EQ(averager.step(), step);
      const auto parameter = own_number();
      averager.average_parameters(Tensors{parameter});
      const bool averaged = step >= 2 && (step - 2) % 3 == 0;
      EXPECT_EQ(value_of(parameter), averaged ? 0.5 : rank) << step;
    }
  });
}

TEST(HierarchicalModelAverager, TheLargestPeriodThatFitsDecidesTheGroup) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    HierarchicalModelAverager averager({{2, 2}, {4, 4}}, /*warmup_steps=*/3);
    ASSERT_EQ(averager.period_process_group_dict().size(), 2u);
    EXPECT_EQ(get_process_group_ranks(averager.period_process_group_dict()[0].second),
              (std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1}));
    for (int step = 0; step < 13; ++step) {
      const auto parameter = own_number();
      averager.average_parameters(std::vector<optim::OptimizerParamGroup>{{Tensors{parameter}}});
      double expected = rank;
      if (step >= 3 && step % 4 == 0) {
        expected = 1.5;
      } else if (step >= 3 && step % 2 == 0) {
        expected = rank / 2 * 2 + 0.5;
      }
      EXPECT_EQ(value_of(parameter), expected) << step;
    }
  });
}

TEST(ModelAveragers, FollowTheDefaultGroup) {
  run_ranks(4, [](int) {
    auto world = init_process_group();
    PeriodicModelAverager periodic(2);
    HierarchicalModelAverager hierarchical({{1, 2}, {3, 4}});
    const auto average = [](ModelAverager& averager) {
      const auto parameter = own_number();
      averager.average_parameters(Tensors{parameter});
      return value_of(parameter);
    };
    EXPECT_EQ(average(periodic), 1.5);
    EXPECT_EQ(average(hierarchical), 1.5);
    shrink_group();
    EXPECT_EQ(average(hierarchical), get_rank() / 2 * 2 + 0.5);
    EXPECT_EQ(average(periodic), get_rank());
    EXPECT_EQ(average(periodic), 1.5);
    const int former = get_rank();
    if (former == 3) return;
    shrink_group({3});
    EXPECT_EQ(average(periodic), former);
    EXPECT_EQ(average(periodic), 1);
    EXPECT_THAT(
        message_of<c10::ValueError>([&] { average(hierarchical); }),
        AllOf(HasSubstr("the default group has 3 ranks now, and this averager's groups are for 4, as many "
                        "as there were when it was made"),
              HasSubstr("whose last group size is 3"), HasSubstr("set_step(2)")));
    HierarchicalModelAverager another({{2, 3}});
    another.set_step(hierarchical.step());
    EXPECT_EQ(average(another), 1);
  });
}

TEST(ModelAveragers, RefuseBadArgumentsAndWarnOfPeriodOne) {
  const auto outcomes = testing::run_ranks_collect(2, [](int) {
    auto world = init_process_group();
    using Levels = std::vector<std::pair<int64_t, int>>;
    const auto periodic = [](int64_t period, int64_t warmup) {
      return message_of<c10::ValueError>([=] { PeriodicModelAverager averager(period, warmup); });
    };
    EXPECT_THAT(periodic(0, 0), HasSubstr("Arg ``period`` must be a positive value"));
    EXPECT_THAT(periodic(2, -1), HasSubstr("Arg ``warmup_steps`` must be a non-negative number"));
    const auto hierarchical = [](const Levels& levels, int64_t warmup = 0) {
      return message_of<c10::ValueError>([&] { HierarchicalModelAverager averager(levels, warmup); });
    };
    EXPECT_THAT(hierarchical({}), HasSubstr("must not be empty"));
    EXPECT_THAT(hierarchical({{0, 2}}), HasSubstr("The minimum period"));
    EXPECT_THAT(hierarchical({{4, 1}, {2, 2}}), HasSubstr("must ascend"));
    EXPECT_THAT(hierarchical({{2, 1}}), HasSubstr("must be equal to the size of arg ``process_group`` 2"));
    EXPECT_THAT(hierarchical({{2, 2}}, -1), HasSubstr("warmup_steps"));
    PeriodicModelAverager(1);
    HierarchicalModelAverager({{1, 2}});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << outcome.exception.value_or("");
    EXPECT_THAT(outcome.output, HasSubstr("When period is 1, no need to use model averaging"));
    EXPECT_THAT(outcome.output, HasSubstr("When the maximum period"));
  }
}

TEST(PostLocalSGDOptimizer, StepsLocallyAndAveragesPeriodically) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto first = torch::zeros({2}, at::kDouble).requires_grad_();
    const auto second = torch::zeros({3}, at::kDouble).requires_grad_();
    PostLocalSGDOptimizer optimizer(
        std::make_unique<optim::SGD>(Tensors{first}, optim::SGDOptions(0.1).momentum(0.5)),
        std::make_shared<PeriodicModelAverager>(2, 1));
    optimizer.add_param_group({{second}, std::make_unique<optim::SGDOptions>(optim::SGDOptions(1))});
    optim::StepLR schedule(optimizer, 3, 0.5);
    // The same by hand, all ranks at once.
    std::vector<std::array<double, 2>> weights(3, {0, 0}), momenta(3, {0, 0});
    std::array<double, 2> rates{0.1, 1};
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      at::Tensor(first).mutable_grad() = torch::full({2}, rank + step, at::kDouble);
      at::Tensor(second).mutable_grad() = torch::full({3}, rank - step, at::kDouble);
      optimizer.step();
      schedule.step();
      std::array<double, 2> sums{0, 0};
      for (int peer = 0; peer < 3; ++peer) {
        const std::array<double, 2> gradients{static_cast<double>(peer + step),
                                              static_cast<double>(peer - step)};
        for (size_t i = 0; i < 2; ++i) {
          momenta[peer][i] = 0.5 * momenta[peer][i] + gradients[i];
          weights[peer][i] -= rates[i] * momenta[peer][i];
          sums[i] += weights[peer][i];
        }
      }
      if (step >= 1 && (step - 1) % 2 == 0) {
        for (auto& of_peer : weights) of_peer = {sums[0] / 3, sums[1] / 3};
      }
      if (step > 0 && step % 3 == 0) rates = {rates[0] / 2, rates[1] / 2};  // as LibTorch's StepLR counts
      EXPECT_NEAR(value_of(first), weights[rank][0], 1e-12) << step;
      EXPECT_NEAR(value_of(second), weights[rank][1], 1e-12) << step;
    }
    EXPECT_EQ(optimizer.averager().step(), 8);
    EXPECT_EQ(optimizer.optim().state().size(), 2u);
  });
}

TEST(PostLocalSGDOptimizer, CheckpointsHaveTheAveragersStep) {
  const auto outcomes = testing::run_ranks_collect(1, [](int) {
    auto world = init_process_group();
    const auto make = [](const torch::Tensor& parameter) {
      return std::make_unique<PostLocalSGDOptimizer>(
          std::make_unique<optim::Adam>(Tensors{parameter}, optim::AdamOptions(0.1)),
          std::make_shared<PeriodicModelAverager>(4, 10));
    };
    const auto parameter = own_number();
    auto optimizer = make(parameter);
    for (int step = 0; step < 5; ++step) optimizer->step();
    optimizer->param_groups()[0].options().set_lr(0.7);
    std::stringstream stream;
    torch::save(*optimizer, stream);
    const std::string bytes = stream.str();

    const auto copy = parameter.detach().clone().requires_grad_();
    at::Tensor(copy).mutable_grad() = parameter.grad().clone();
    auto restored = make(copy);
    torch::load(*restored, stream);
    EXPECT_EQ(restored->averager().step(), 5);
    EXPECT_EQ(restored->param_groups()[0].options().get_lr(), 0.7);
    restored->step();
    optimizer->step();
    EXPECT_TRUE(at::equal(copy, parameter));

    // The local optimizer alone reads it, and what it writes can be read.
    const auto bare = own_number();
    optim::Adam plain(Tensors{bare}, optim::AdamOptions(0.1));
    std::istringstream again(bytes);
    torch::load(plain, again);
    EXPECT_EQ(plain.state().size(), 1u);
    std::stringstream of_plain;
    torch::save(plain, of_plain);
    torch::load(*restored, of_plain);
    EXPECT_EQ(restored->averager().step(), 0);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << outcome.exception.value_or("");
    EXPECT_THAT(outcome.output,
                HasSubstr("Loaded state dict does not contain a step counter for an averager."));
  }
}

}  // namespace
}  // namespace lockstep::model_averaging_test

#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/join.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::zero_redundancy_optimizer_test {
namespace {

namespace optim = torch::optim;
using optim::OptimizerParamGroup;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;
using Tensors = std::vector<torch::Tensor>;

/// Parameters of uneven sizes, the same on all ranks: one in channels-last order, one without elements, one
/// that is larger than a parcel of several.
Tensors make_parameters() {
  Tensors parameters;
  const std::vector<std::vector<int64_t>> sizes{{3, 4}, {7},      {2, 3, 4, 5}, {1},
                                                {0, 4}, {40, 30}, {5, 5},       {400, 350}};
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto parameter = random(sizes[i], i);
    if (i == 2) parameter = parameter.contiguous(at::MemoryFormat::ChannelsLast);
    parameters.push_back(parameter.requires_grad_());
  }
  return parameters;
}

/// What DistributedDataParallel leaves: the same gradients on all ranks.
void set_gradients(const Tensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor(parameters[i]).mutable_grad() = random(parameters[i].sizes(), 1000 + 100 * step + i);
  }
}

template <class Options>
std::vector<OptimizerParamGroup> two_groups(const Tensors& parameters, const Options& options) {
  return {OptimizerParamGroup(Tensors(parameters.begin(), parameters.begin() + 5)),
          OptimizerParamGroup(Tensors(parameters.begin() + 5, parameters.end()),
                              std::make_unique<Options>(options))};
}

void expect_equal(const Tensors& actual, const Tensors& expected, const std::string& where) {
  testing::expect_equal(actual, expected, where, /*tolerance=*/1e-12);
}

template <class Optimizer, class Options>
void expect_steps_of_the_plain_optimizer(const std::string& name, const Options& defaults,
                                         const Options& of_second) {
  for (const bool bucket_view : {false, true}) {
    const auto where = name + (bucket_view ? " with buckets" : "");
    const auto parameters = make_parameters();
    const auto expected = make_parameters();
    ZeroRedundancyOptimizer zero(two_groups(parameters, of_second), optimizer_class<Optimizer>(defaults),
                                 {.parameters_as_bucket_view = bucket_view});
    Optimizer plain(two_groups(expected, of_second), defaults);
    optim::StepLR schedule(zero, 2, 0.5);
    optim::StepLR plain_schedule(plain, 2, 0.5);
    for (int step = 0; step < 4; ++step) {
      zero.zero_grad();
      for (const auto& parameter : parameters) EXPECT_FALSE(parameter.grad().defined());
      set_gradients(parameters, step);
      set_gradients(expected, step);
      zero.step();
      plain.step();
      schedule.step();
      plain_schedule.step();
      expect_equal(parameters, expected, where + ", step " + std::to_string(step));
    }
    EXPECT_EQ(parameters[2].strides(), expected[2].strides()) << where;
    // All states are somewhere, and each only once.
    const auto count = torch::full({1}, static_cast<int64_t>(zero.optim().state().size()), torch::kLong);
    if (get_world_size() > 1) {
      EXPECT_LT(zero.optim().state().size(), plain.state().size()) << where;
    }
    all_reduce(count);
    EXPECT_EQ(count.item<int64_t>(), plain.state().size()) << where;
    EXPECT_TRUE(zero.state().empty());
  }
}

TEST(ZeroRedundancyOptimizer, ItsTensorsHereAreThoseOfThisRanksPart) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const Tensors parameters = make_parameters();
    ZeroRedundancyOptimizer optimizer(parameters, optimizer_class<optim::Adam>(optim::AdamOptions(0.1)));
    EXPECT_TRUE(optimizer_state_tensors(optimizer).empty()) << "before the first step";
    set_gradients(parameters, 0);
    optimizer.step();
    int64_t whole = 0, here = 0;
    for (const auto& parameter : parameters) whole += 2 * parameter.numel();  // Adam's two
    for (const auto& tensor : optimizer_state_tensors(optimizer)) here += tensor.numel();
    EXPECT_LT(here, whole);
    auto sum = torch::tensor({here});
    all_reduce(sum, ReduceOp::SUM);
    EXPECT_EQ(sum.item<int64_t>(), whole);
  });
}

TEST(ZeroRedundancyOptimizer, StepsAsThePlainOptimizerDoes) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [](int) {
      auto world = init_process_group();
      expect_steps_of_the_plain_optimizer<optim::SGD>("SGD", optim::SGDOptions(0.1).momentum(0.9),
                                                      optim::SGDOptions(0.05).momentum(0.8).nesterov(true));
      expect_steps_of_the_plain_optimizer<optim::Adam>("Adam", optim::AdamOptions(0.01).weight_decay(0.1),
                                                       optim::AdamOptions(0.02).amsgrad(true));
      expect_steps_of_the_plain_optimizer<optim::AdamW>("AdamW", optim::AdamWOptions(0.01),
                                                        optim::AdamWOptions(0.02).weight_decay(0.3));
      expect_steps_of_the_plain_optimizer<optim::RMSprop>(
          "RMSprop", optim::RMSpropOptions(0.01).momentum(0.5), optim::RMSpropOptions(0.02).centered(true));
      expect_steps_of_the_plain_optimizer<optim::Adagrad>("Adagrad", optim::AdagradOptions(0.1),
                                                          optim::AdagradOptions(0.2).lr_decay(0.1));
    });
  }
}

TEST(ZeroRedundancyOptimizer, SharesOutStateEvenly) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    Tensors parameters;
    for (int i = 0; i < 16; ++i) parameters.push_back(torch::ones({i + 1}).requires_grad_());
    ZeroRedundancyOptimizer zero(parameters, optimizer_class<optim::Adam>(optim::AdamOptions(0.01)));
    for (auto& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    zero.step();
    int64_t elements = 0;
    for (const auto& [key, state] : zero.optim().state()) {
      elements += static_cast<const optim::AdamParamState&>(*state).exp_avg().numel();
    }
    EXPECT_EQ(elements, 16 * 17 / 2 / 4);
    EXPECT_EQ(zero.partition()[static_cast<size_t>(rank)][0].size(), 4u);
  });
}

TEST(ZeroRedundancyOptimizer, FewerParametersThanRanks) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool bucket_view : {false, true}) {
      const Tensors parameters{torch::ones({4}, at::kDouble).requires_grad_()};
      ZeroRedundancyOptimizer zero(parameters, optimizer_class<optim::Adam>(optim::AdamOptions(0.01)),
                                   {.parameters_as_bucket_view = bucket_view});
      const Tensors expected{torch::ones({4}, at::kDouble).requires_grad_()};
      optim::Adam plain(expected, optim::AdamOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        set_gradients(parameters, step);
        set_gradients(expected, step);
        zero.step();
        plain.step();
      }
      expect_equal(parameters, expected, "one parameter");
      EXPECT_EQ(zero.optim().state().size(), rank == 0 ? 1u : 0u);
      zero.consolidate_state_dict();
    }
  });
}

TEST(ZeroRedundancyOptimizer, AddsGroupsAndFollowsTrainability) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    for (const bool bucket_view : {false, true}) {
      const auto parameters = make_parameters();
      const auto expected = make_parameters();
      const Tensors first(parameters.begin(), parameters.begin() + 4);
      const Tensors rest(parameters.begin() + 4, parameters.end());
      ZeroRedundancyOptimizer zero(first, optimizer_class<optim::AdamW>(optim::AdamWOptions(0.01)),
                                   {.parameters_as_bucket_view = bucket_view});
      optim::AdamW plain(Tensors(expected.begin(), expected.begin() + 4), optim::AdamWOptions(0.01));
      for (int step = 0; step < 8; ++step) {
        if (step == 2) {
          zero.param_groups()[0].options().set_lr(0.5);
          plain.param_groups()[0].options().set_lr(0.5);
          zero.add_param_group({rest, std::make_unique<optim::AdamWOptions>(0.03)});
          plain.add_param_group(
              {Tensors(expected.begin() + 4, expected.end()), std::make_unique<optim::AdamWOptions>(0.03)});
          EXPECT_EQ(zero.param_groups().at(1).options().get_lr(), 0.03);
          EXPECT_EQ(zero.param_groups().at(0).options().get_lr(), 0.5);
        }
        for (const auto& list : {parameters, expected}) {
          set_gradients(list, step);
          list[0].requires_grad_(step < 4 || step > 5);
          list[5].requires_grad_(step < 4 || step > 5);
          if (!list[0].requires_grad()) {
            at::Tensor(list[0]).mutable_grad().reset();
            at::Tensor(list[5]).mutable_grad().reset();
          }
        }
        zero.step();
        plain.step();
        expect_equal(parameters, expected, std::to_string(bucket_view) + ", step " + std::to_string(step));
      }
      // What is added through the base class is noticed.
      static_cast<optim::Optimizer&>(zero).add_param_group(
          {{torch::ones({2}, at::kDouble).requires_grad_()}});
      EXPECT_THAT(message_of<c10::Error>([&] { zero.step(); }), HasSubstr("add_param_group()"));
    }
  });
}

TEST(ZeroRedundancyOptimizer, EveryRankEvaluatesTheClosure) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto weight = torch::ones({3}, at::kDouble).requires_grad_();
    ZeroRedundancyOptimizer zero(Tensors{weight}, optimizer_class<optim::SGD>(optim::SGDOptions(0.5)));
    int calls = 0;
    const auto loss = zero.step([&] {
      ++calls;
      zero.zero_grad();
      auto value = weight.sum() + rank;
      value.backward();
      return value;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(loss.item<double>(), 3 + rank);
    EXPECT_TRUE(at::equal(weight.detach(), torch::full({3}, 0.5, at::kDouble)));
  });
}

template <class Optimizer>
std::string saved(const Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return std::move(stream).str();
}

template <class Optimizer>
void restore(Optimizer& optimizer, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(optimizer, stream);
}

/// Rank `src`'s bytes, everywhere.
std::string shared(std::string bytes, int src) {
  const auto length = torch::full({1}, static_cast<int64_t>(bytes.size()), torch::kLong);
  broadcast(length, src);
  bytes.resize(static_cast<size_t>(length.item<int64_t>()));
  broadcast(torch::from_blob(bytes.data(), {length.item<int64_t>()}, torch::kByte), src);
  return bytes;
}

template <class Optimizer, class Options>
void expect_checkpoints_for_any_number_of_ranks(const Options& options) {
  const int rank = get_rank();
  const auto pair = new_group({0, 2});
  for (const bool bucket_view : {false, true}) {
    const auto parameters = make_parameters();
    const auto expected = make_parameters();
    ZeroRedundancyOptimizer zero(two_groups(parameters, options), optimizer_class<Optimizer>(Options(0.01)),
                                 {.parameters_as_bucket_view = bucket_view});
    Optimizer plain(two_groups(expected, options), Options(0.01));
    const auto both_step = [&](optim::Optimizer& sharded, const Tensors& its, int step) {
      set_gradients(its, step);
      set_gradients(expected, step);
      sharded.step();
      plain.step();
    };
    for (int step = 0; step < 3; ++step) both_step(zero, parameters, step);
    zero.param_groups()[0].options().set_lr(0.004);
    plain.param_groups()[0].options().set_lr(0.004);
    EXPECT_THAT(message_of<c10::Error>([&] { saved(zero); }),
                HasSubstr("Please call `consolidate_state_dict(to=" + std::to_string(rank) + ")`"));
    zero.consolidate_state_dict(1);
    if (rank != 1) {
      EXPECT_THROW(saved(zero), c10::Error);
    }
    const auto checkpoint = shared(rank == 1 ? saved(zero) : "", 1);
    const auto of_plain = saved(plain);
    Tensors middle;
    for (const auto& parameter : parameters) middle.push_back(parameter.detach().clone());
    const auto resume = [&](optim::Optimizer& optimizer, const Tensors& its, const std::string& bytes) {
      // The plain optimizer has gone on meanwhile: back to the middle.
      restore(plain, of_plain);
      restore(optimizer, bytes);
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.004);
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < its.size(); ++i) its[i].copy_(middle[i]);
      for (size_t i = 0; i < its.size(); ++i) expected[i].copy_(middle[i]);
      for (int step = 3; step < 6; ++step) both_step(optimizer, its, step);
      expect_equal(its, expected, "resumed");
    };
    resume(zero, parameters, checkpoint);  // where it came from, which has gone on
    {
      const auto fresh = make_parameters();
      ZeroRedundancyOptimizer again(two_groups(fresh, options), optimizer_class<Optimizer>(Options(0.5)));
      resume(again, fresh, of_plain);
    }
    {
      const auto fresh = make_parameters();
      Optimizer alone(two_groups(fresh, options), Options(0.5));
      resume(alone, fresh, checkpoint);
    }
    if (is_member(pair)) {
      const auto fresh = make_parameters();
      ZeroRedundancyOptimizer two(two_groups(fresh, options), optimizer_class<Optimizer>(Options(0.5)),
                                  {.process_group = pair, .parameters_as_bucket_view = bucket_view});
      resume(two, fresh, checkpoint);
      two.consolidate_state_dict(1);
      if (rank == 2) {
        EXPECT_FALSE(saved(two).empty()) << "the group's rank 1";
      }
    }
  }
}

TEST(ZeroRedundancyOptimizer, CheckpointsAreThePlainOptimizersForAnyNumberOfRanks) {
  run_ranks(3, [](int) {
    auto world = init_process_group();
    expect_checkpoints_for_any_number_of_ranks<optim::Adam>(optim::AdamOptions(0.02).amsgrad(true));
    expect_checkpoints_for_any_number_of_ranks<optim::SGD>(optim::SGDOptions(0.02).momentum(0.9));
    expect_checkpoints_for_any_number_of_ranks<optim::Adagrad>(optim::AdagradOptions(0.02));
  });
}

TEST(ZeroRedundancyOptimizer, AConsolidatedStateDoesNotMoveWithLaterSteps) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto parameters = make_parameters();
    ZeroRedundancyOptimizer zero(parameters, optimizer_class<optim::Adam>(optim::AdamOptions(0.01)));
    set_gradients(parameters, 0);
    zero.step();
    zero.consolidate_state_dict();
    const auto moments = [&] {
      const auto fresh = make_parameters();
      optim::Adam plain(fresh, optim::AdamOptions(0.01));
      restore(plain, saved(zero));
      Tensors answer;
      for (const auto& parameter : fresh) {
        const auto& state = *plain.state().at(parameter.unsafeGetTensorImpl());
        answer.push_back(static_cast<const optim::AdamParamState&>(state).exp_avg().clone());
      }
      return answer;
    };
    const auto before = rank == 0 ? moments() : Tensors{};
    set_gradients(parameters, 1);
    zero.step();
    if (rank == 0) expect_equal(moments(), before, "stale");
  });
}

/// Averages gradients of ranks that have different ones; a stand-in for DistributedDataParallel's joinable.
class GradientAverager : public Joinable {
 public:
  explicit GradientAverager(Tensors parameters) : parameters_(std::move(parameters)) {}
  void average(int input) {
    Join::notify_join_context(*this);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      reduce(i, random(parameters_[i].sizes(), 1000 * input + 10 * i + static_cast<size_t>(get_rank())));
    }
  }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override { return std::make_unique<Hook>(*this); }
  at::Device join_device() const override { return at::kCPU; }
  ProcessGroup join_process_group() const override { return {}; }

 private:
  struct Hook : JoinHook {
    explicit Hook(GradientAverager& averager) : averager_(averager) {}
    void main_hook() override {
      for (size_t i = 0; i < averager_.parameters_.size(); ++i)
        averager_.reduce(i, torch::zeros_like(averager_.parameters_[i]).detach());
    }
    GradientAverager& averager_;
  };
  void reduce(size_t index, torch::Tensor gradient) {
    all_reduce(gradient);
    at::Tensor(parameters_[index]).mutable_grad() = gradient / get_world_size();
  }
  Tensors parameters_;
};

TEST(ZeroRedundancyOptimizer, JoinsWithUnevenInputs) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto make = [] {
      Tensors parameters;
      for (int i = 0; i < 5; ++i) parameters.push_back(random({3, i + 1}, i).requires_grad_());
      return parameters;
    };
    const auto parameters = make();
    const auto expected = make();
    GradientAverager averager(parameters);
    ZeroRedundancyOptimizer zero(parameters, optimizer_class<optim::Adam>(optim::AdamOptions(0.1)));
    {
      Join join({&averager, &zero});
      for (int input = 0; input < 2 + 2 * rank; ++input) {
        averager.average(input);
        zero.step();
      }
    }
    optim::Adam plain(expected, optim::AdamOptions(0.1));
    for (int input = 0; input < 6; ++input) {
      for (size_t i = 0; i < expected.size(); ++i) {
        auto sum = torch::zeros_like(expected[i]).detach();
        for (int peer = 0; peer < 3; ++peer) {
          if (input < 2 + 2 * peer)
            sum += random(expected[i].sizes(), 1000 * input + 10 * i + static_cast<size_t>(peer));
        }
        at::Tensor(expected[i]).mutable_grad() = sum / 3;
      }
      plain.step();
    }
    expect_equal(parameters, expected, "joined");
    // As the only joinable it notifies the others itself; with the same gradients everywhere.
    {
      Join join({&zero});
      for (int input = 0; input < 4 - rank; ++input) zero.step();
    }
    for (int input = 0; input < 4; ++input) plain.step();
    expect_equal(parameters, expected, "alone");
  });
}

TEST(ZeroRedundancyOptimizer, RefusesWhatItCanNotShareOut) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  const auto adam = optimizer_class<optim::Adam>(optim::AdamOptions(0.01));
  const auto one = torch::ones({2}).requires_grad_();
  const auto make = [&](const Tensors& parameters) { ZeroRedundancyOptimizer zero(parameters, adam); };
  const auto message = [&](const Tensors& parameters) {
    return message_of<c10::ValueError>([&] { make(parameters); });
  };
  EXPECT_THAT(message({}), HasSubstr("ZeroRedundancyOptimizer got an empty parameter list"));
  EXPECT_THAT(message({one, torch::ones({2}, at::kDouble)}),
              HasSubstr("got both CPUFloatType and CPUDoubleType"));
  EXPECT_THAT(message({torch::ones({2, 2}).to_sparse()}), HasSubstr("same dense type"));
  EXPECT_THAT(message({one, one}), HasSubstr("some parameters appear in more than one parameter group"));
  EXPECT_THAT(message({one * 2}), HasSubstr("non-leaf"));
  EXPECT_THAT(message({torch::Tensor()}), HasSubstr("undefined"));
  EXPECT_THROW(ZeroRedundancyOptimizer(Tensors{one}, OptimizerFactory{}), c10::ValueError);
  ZeroRedundancyOptimizer zero(Tensors{one}, adam);
  EXPECT_THAT(message_of<c10::ValueError>([&] { zero.consolidate_state_dict(1); }), HasSubstr("no rank 1"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { zero.add_param_group({{one}}); }),
              HasSubstr("more than one"));
  EXPECT_THROW(ZeroRedundancyOptimizer(Tensors{one}, optimizer_class<optim::LBFGS>(optim::LBFGSOptions(1)),
                                       {.overlap_with_ddp = true}),
               c10::ValueError);
}

TEST(ZeroRedundancyOptimizer, AStepNamesTheRankThatDied) {
  const auto outcomes = testing::run_ranks_collect(
      3,
      [](int rank) {
        auto world = init_process_group();
        const auto parameters = make_parameters();
        ZeroRedundancyOptimizer zero(parameters, optimizer_class<optim::Adam>(optim::AdamOptions(0.01)));
        set_gradients(parameters, 0);
        zero.step();
        if (rank == 1) std::_Exit(7);
        EXPECT_THAT(message_of([&] { zero.step(); }), HasSubstr("exited with status 7"));
      },
      {.expected_failures = {1}});
  testing::expect_survivors(outcomes, {1});
}

}  // namespace
}  // namespace lockstep::zero_redundancy_optimizer_test

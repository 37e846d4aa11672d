#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/grad_bucket.h>
#include <lockstep/parallel/ddp/hooks/zero_hook.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::zero_hook_test {
namespace {

namespace optim = torch::optim;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;
using Tensors = std::vector<torch::Tensor>;

Tensors make_parameters() {
  Tensors parameters;
  const std::vector<std::vector<int64_t>> sizes{{3, 4}, {7}, {2, 3, 4, 5}, {1}, {40, 30}, {5, 5}, {2}};
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto parameter = random(sizes[i], i);
    if (i == 2) parameter = parameter.contiguous(at::MemoryFormat::ChannelsLast);
    parameters.push_back(parameter.requires_grad_());
  }
  return parameters;
}

/// A rank's own gradient.
torch::Tensor gradient(int step, size_t index, int rank, const torch::Tensor& parameter) {
  return random(parameter.sizes(), 1000 * step + 10 * index + static_cast<size_t>(rank));
}

/// What allreduce_hook does, with a state to see that it is handed on.
HookFuture average(int& calls, GradBucket& bucket) {
  ++calls;
  bucket.buffer().div_(get_world_size());
  return all_reduce(bucket.buffer(), ReduceOp::SUM, {}, /*async_op=*/true)->getFuture();
}

/// The reducer's part: packs the gradients of the buckets' parameters in memory order and calls the hook for
/// each bucket, then waits.
template <class Hook>
void backward(Hook& hook, const Tensors& parameters, const std::vector<std::vector<size_t>>& buckets,
              int step, int& calls) {
  std::vector<HookFuture> futures;
  for (size_t index = 0; index < buckets.size(); ++index) {
    Tensors members, parts;
    for (const size_t i : buckets[index]) {
      members.push_back(parameters[i]);
      auto part = torch::empty_like(parameters[i].detach());  // the parameter's memory order
      part.copy_(gradient(step, i, get_rank(), parameters[i]));
      parts.push_back(part.as_strided({part.numel()}, {1}));
    }
    GradBucket bucket(index, torch::cat(parts), members, index + 1 == buckets.size());
    futures.push_back(hook(calls, bucket));
  }
  for (const auto& future : futures) future->waitAndThrow();
}

template <class MakeHook>
void expect_steps_of_the_plain_optimizer(MakeHook make_hook) {
  const auto parameters = make_parameters();
  const auto expected = make_parameters();
  const auto groups = [](const Tensors& list) {
    return std::vector<optim::OptimizerParamGroup>{
        optim::OptimizerParamGroup(Tensors(list.begin(), list.begin() + 3)),
        optim::OptimizerParamGroup(Tensors(list.begin() + 3, list.end()),
                                   std::make_unique<optim::AdamOptions>(0.03))};
  };
  ZeroRedundancyOptimizer zero(groups(parameters), optimizer_class<optim::Adam>(optim::AdamOptions(0.01)),
                               {.overlap_with_ddp = true});
  optim::Adam plain(groups(expected), optim::AdamOptions(0.01));
  auto hook = make_hook(average, zero);
  int calls = 0;
  for (int step = 0; step < 6; ++step) {
    // Other buckets from the second step on, as the reducer builds them.
    const auto buckets = step == 0 ? std::vector<std::vector<size_t>>{{6, 5}, {4}, {3, 2, 1, 0}}
                                   : std::vector<std::vector<size_t>>{{5, 6, 4, 3}, {2, 0}, {1}};
    if (step == 3) {
      zero.param_groups()[0].options().set_lr(0.1);
      plain.param_groups()[0].options().set_lr(0.1);
    }
    at::Tensor(parameters[4]).mutable_grad() = torch::full_like(parameters[4], 7).detach();
    backward(hook, parameters, buckets, step, calls);
    if (step == 0) {
      EXPECT_FALSE(zero.step().defined()) << "there is nothing left to do";
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      auto sum = torch::zeros_like(expected[i]).detach();
      for (int peer = 0; peer < get_world_size(); ++peer) sum += gradient(step, i, peer, expected[i]);
      at::Tensor(expected[i]).mutable_grad() = sum / get_world_size();
    }
    plain.step();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(parameters[i], expected[i], 1e-12, 1e-12)) << step << ", parameter " << i;
    }
    EXPECT_EQ(parameters[4].grad().max().item<double>(), 7) << "gradients are the reducer's";
    EXPECT_EQ(calls, 3 * (step + 1));
  }
  EXPECT_LE(zero.optim().state().size(), get_world_size() == 1 ? 7u : 6u);
  // State moves in and out while overlapping, too.
  zero.consolidate_state_dict();
  if (get_rank() == 0) {
    std::stringstream stream;
    torch::save(zero, stream);
    const auto fresh = make_parameters();
    optim::Adam restored(groups(fresh), optim::AdamOptions(0.5));
    torch::load(restored, stream);
    for (size_t i = 0; i < fresh.size(); ++i) {
      const auto moment = [&](optim::Adam& adam, const torch::Tensor& parameter) {
        return static_cast<optim::AdamParamState&>(*adam.state().at(parameter.unsafeGetTensorImpl()))
            .exp_avg();
      };
      EXPECT_TRUE(at::allclose(moment(restored, fresh[i]), moment(plain, expected[i]), 1e-12, 1e-12)) << i;
    }
  }
}

TEST(ZeroHook, StepsAsTheReductionGoes) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [](int) {
      auto world = init_process_group();
      expect_steps_of_the_plain_optimizer(
          [](auto hook, auto& zero) { return hook_with_zero_step(hook, zero); });
      expect_steps_of_the_plain_optimizer(
          [](auto hook, auto& zero) { return hook_with_zero_step_interleaved(hook, zero); });
    });
  }
}

TEST(ZeroHook, GoesOnAfterAnIterationThatFailed) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const Tensors parameters{torch::zeros({2}, at::kDouble).requires_grad_(),
                             torch::zeros({3}, at::kDouble).requires_grad_()};
    ZeroRedundancyOptimizer zero(parameters, optimizer_class<optim::SGD>(optim::SGDOptions(1)),
                                 {.overlap_with_ddp = true});
    for (const bool interleaved : {false, true}) {
      OverlappedZeroStep step(zero, interleaved);
      const auto bucket = [&](size_t index, bool last) {
        return GradBucket(index, torch::ones({parameters[index].numel()}, at::kDouble), {parameters[index]},
                          last);
      };
      const auto give = [&](size_t index) {
        auto its = bucket(index, index == 1);
        return step(completed_future(its.buffer()), its);
      };
      give(0);  // and the last bucket never comes
      for (const auto& parameter : parameters) at::Tensor(parameter).detach().zero_();
      give(0);
      give(1);
      for (const auto& parameter : parameters) EXPECT_EQ(parameter.sum().item<double>(), -parameter.numel());
      EXPECT_THAT(message_of<c10::Error>([&] { give(1); }), HasSubstr("not in incremental order"));
    }
  });
}

TEST(ZeroHook, RefusesMisuse) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  const Tensors parameters{torch::zeros({2, 3}).requires_grad_()};
  const auto sgd = optimizer_class<optim::SGD>(optim::SGDOptions(1));
  ZeroRedundancyOptimizer apart(parameters, sgd);
  EXPECT_THAT(message_of<c10::ValueError>([&] { hook_with_zero_step(average, apart); }),
              HasSubstr("`overlap_with_ddp=True`"));
  ZeroRedundancyOptimizer zero(parameters, sgd, {.overlap_with_ddp = true});
  OverlappedZeroStep step(zero, true);
  const auto sparse = torch::ones({2, 3}).to_sparse();
  EXPECT_THAT(message_of<c10::Error>(
                  [&] { step(completed_future(sparse), GradBucket(0, sparse, parameters, true)); }),
              HasSubstr("sparse"));
  EXPECT_THAT(message_of<c10::Error>([&] { Join join({&zero}); }), HasSubstr("can't be in a Join"));
  parameters[0].requires_grad_(false);
  const auto flat = torch::ones({6});
  EXPECT_THAT(
      message_of<c10::Error>([&] { step(completed_future(flat), GradBucket(0, flat, parameters, true)); }),
      HasSubstr("does not support changing parameter trainability"));
}

}  // namespace
}  // namespace lockstep::zero_hook_test

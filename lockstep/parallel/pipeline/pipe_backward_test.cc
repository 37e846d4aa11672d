// What runs at the same time in a Pipe, and what its backward refuses, says and leaves behind.
#include <atomic>
#include <gmock/gmock.h>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/testing/pipe_fixtures.h>
#include <lockstep/testing/meeting.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::pipe_backward_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::Calls;
using testing::CallsBackward;
using testing::copy_of;
using testing::equal;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Meeting;
using testing::message_of;
using testing::on_micro_batches;
using testing::random;
using torch::Tensor;

PipeOptions on_two_cpus(int64_t chunks) {
  return {.devices = {at::Device(at::kCPU), at::Device(at::kCPU)}, .chunks = chunks};
}

nn::Sequential small_net() {
  torch::manual_seed(1);
  nn::Sequential net{nn::Linear(3, 4), nn::Tanh(), nn::Linear(4, 2)};
  net->to(at::kDouble);
  return net;
}

TEST(PipeBackward, PartitionsComputeAtOnce) {
  Meeting forward(2), backward(2);
  std::atomic<bool> forward_met{true}, backward_met{true};
  const auto meet = [](Meeting& meeting, std::atomic<bool>& met) {
    if (!meeting.arrive()) met = false;
  };
  // Partition 0 is one micro-batch ahead in forward, and one behind in backward, which begins with the last.
  nn::Sequential net{nn::Linear(3, 3),
                     Calls([&](int m) {
                       if (m == 1) meet(forward, forward_met);
                     }),
                     CallsBackward([&](int m) {
                       if (m == 2) meet(backward, backward_met);
                     }),
                     Calls([&](int m) {
                       if (m == 0) meet(forward, forward_met);
                     }),
                     CallsBackward([&](int m) {
                       if (m == 1) meet(backward, backward_met);
                     }),
                     nn::Linear(3, 3)};
  Pipe pipe(net, {3, 3}, on_two_cpus(3));
  pipe(random({6, 3}, 0, at::kFloat)).sum().backward();
  EXPECT_TRUE(forward_met);
  EXPECT_TRUE(backward_met);
}

TEST(PipeBackward, SaysWhereItHasFailed) {
  bool fails = true;
  nn::Sequential net{nn::Linear(3, 3), nn::Linear(3, 3), CallsBackward([&](int m) {
                       if (fails && m == 1) throw std::runtime_error("a backward of mine");
                     })};
  Pipe pipe(net, {1, 2}, on_two_cpus(3));
  const auto x = random({6, 3}, 0, at::kFloat);
  const auto y = pipe(x).sum();
  EXPECT_THAT(message_of<c10::Error>([&] { y.backward(); }),
              AllOf(HasSubstr("a backward of mine"),
                    HasSubstr("in the backward of partition 1 (layers 1 to 2) on cpu, micro-batch 1 of 3")));
  fails = false;
  pipe(x).sum().backward();
  EXPECT_TRUE(net->parameters()[0].grad().defined());
}

TEST(PipeBackward, RunsAgainIfTheGraphIsRetained) {
  const auto net = small_net(), alone = copy_of(net);
  Pipe pipe(net, {1, 2}, on_two_cpus(2));
  const auto x = random({5, 3});
  const auto actual = loss_of(pipe(x)), expected = loss_of(on_micro_batches(alone, x, 2));
  for (const bool retain : {true, false}) {
    actual.backward({}, retain);
    expected.backward({}, retain);
  }
  EXPECT_TRUE(equal(gradients_of(*net), gradients_of(*alone)));
  EXPECT_THAT(message_of<c10::Error>([&] { actual.backward(); }), HasSubstr("a second time"));
}

TEST(PipeBackward, GivesTheGradientsThatAreAskedFor) {
  const auto net = small_net(), alone = copy_of(net);
  Pipe pipe(net, {1, 2}, on_two_cpus(2));
  auto x = random({5, 3}).requires_grad_();
  const auto grad = [&](const Tensor& y, const Tensor& parameter) {
    return torch::autograd::grad({loss_of(y)}, {x, parameter});
  };
  EXPECT_TRUE(equal(grad(pipe(x), net->parameters()[0]),
                    grad(on_micro_batches(alone, x, 2), alone->parameters()[0])));
  // Two forwards before a backward.
  const auto both = pipe(x) + pipe(x * 2),
             expected = on_micro_batches(alone, x, 2) + on_micro_batches(alone, x * 2, 2);
  const auto sums = grad(both, net->parameters()[2]), expected_sums = grad(expected, alone->parameters()[2]);
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_LT(testing::difference(sums[i], expected_sums[i]), 1e-12);
  EXPECT_FALSE(net->parameters()[0].grad().defined());
}

TEST(PipeBackward, OutlivesThePipeInAnotherThread) {
  const auto net = small_net(), alone = copy_of(net);
  Tensor loss;
  {
    Pipe pipe(net, {2, 1}, on_two_cpus(2));
    loss = loss_of(pipe(random({4, 3})));
  }
  std::thread([&] { loss.backward(); }).join();
  loss_of(on_micro_batches(alone, random({4, 3}), 2)).backward();
  EXPECT_TRUE(equal(gradients_of(*net), gradients_of(*alone)));
}

TEST(PipeBackward, LeavesFrozenAndUnusedParametersWithoutGradients) {
  nn::Sequential net{nn::Linear(3, 3), nn::Linear(3, 3), Calls([](int) {}), nn::Linear(3, 2)};
  for (auto& parameter : net[0]->parameters()) parameter.requires_grad_(false);
  net[2]->register_parameter("unused", torch::ones({1}));
  Pipe pipe(net, {1, 3}, on_two_cpus(2));
  pipe(random({4, 3}, 0, at::kFloat)).sum().backward();
  for (const auto& parameter : net->named_parameters()) {
    const bool has_none = parameter.key().front() == '0' || parameter.key() == "2.unused";
    EXPECT_EQ(parameter->grad().defined(), !has_none) << parameter.key();
  }
}

TEST(PipeBackward, CallsHooksOfTheAccumulatedGradientOnce) {
  const auto net = small_net();
  Pipe pipe(net, {1, 2}, on_two_cpus(4));
  int calls = 0;
  struct Counts : torch::autograd::FunctionPostHook {
    explicit Counts(int& count) : calls(count) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      ++calls;
      return outputs;
    }
    int& calls;
  };
  const auto accumulator = torch::autograd::impl::grad_accumulator(net->parameters()[0]);
  accumulator->add_post_hook(std::make_unique<Counts>(calls));
  loss_of(pipe(random({8, 3}))).backward();
  EXPECT_EQ(calls, 1);
}

TEST(PipeBackward, RefusesHooksOfParametersAndGradientsOfGradients) {
  const auto net = small_net();
  Pipe pipe(net, {1, 2}, on_two_cpus(2));
  const auto x = random({4, 3}).requires_grad_();
  EXPECT_THAT(message_of<c10::Error>([&] {
                torch::autograd::grad({pipe(x).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true);
              }),
              HasSubstr("gradients of gradients"));
  net->parameters()[0].register_hook([](const Tensor& gradient) { return gradient * 2; });
  const auto loss = pipe(x).sum();
  EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("register_hook()"));
}

TEST(PipeBackward, SeesChangesInPlaceAcrossACut) {
  const auto net = [] {
    return nn::Sequential{nn::Linear(3, 3), nn::Tanh(), nn::ReLU(nn::ReLUOptions(true))};
  };
  const auto x = random({4, 3}, 0, at::kFloat);
  auto alone = net();
  const auto expected = alone->forward(x).sum();  // Tanh needs the output that ReLU has changed
  EXPECT_THAT(message_of<c10::Error>([&] { expected.backward(); }),
              HasSubstr("modified by an inplace operation"));
  Pipe pipe(net(), {2, 1}, on_two_cpus(2));
  const auto loss = pipe(x).sum();
  EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }),
              HasSubstr("modified by an inplace operation"));
}

}  // namespace
}  // namespace lockstep::pipe_backward_test

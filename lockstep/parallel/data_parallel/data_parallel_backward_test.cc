// DataParallel's forward and backward: what runs at the same time, in which threads, and what errors say.
#include <algorithm>
#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/data_parallel/testing/fixtures.h>
#include <lockstep/testing/meeting.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::data_parallel_backward_test {
namespace {

using ::testing::AllOf;
using testing::calling;
using testing::Cnn;
using testing::copy_of;
using testing::expect_close;
using testing::expect_same_gradients;
using ::testing::HasSubstr;
using testing::Meeting;
using testing::message_of;
using testing::Nested;
using testing::random;
using testing::weighted_sum;
using torch::Tensor;

/// Multiplies by two; its backward calls a function.
struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, int64_t function) {
    context->saved_data["function"] = function;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    (*reinterpret_cast<std::function<void(const Tensor&)>*>(context->saved_data["function"].toInt()))(
        gradients[0]);
    return {gradients[0] * 2, Tensor()};
  }
};

Tensor doubled(const Tensor& x, std::function<void(const Tensor&)>& in_backward) {
  return Doubled::apply(x, reinterpret_cast<int64_t>(&in_backward));
}

TEST(DataParallel, ComputesForwardAndBackwardAtTheSameTime) {
  Meeting forward(3), backward(3);
  std::function<void(const Tensor&)> in_backward = [&](const Tensor&) { EXPECT_TRUE(backward.arrive()); };
  auto net = calling([&](const Tensor& x, const Tensor& weight) {
    EXPECT_TRUE(forward.arrive());
    return doubled(x * weight, in_backward);
  });
  DataParallel model(net, DataParallelOptions{.num_replicas = 3});
  model(torch::ones({6, 3}, torch::kDouble)).sum().backward();
  expect_close(net->weight.grad(), torch::full({3}, 12.0, torch::kDouble));
}

TEST(DataParallel, SharesTheIntraOpThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  std::atomic<int> most = 0;
  auto net = calling([&](const Tensor& x, const Tensor& weight) {
    most = std::max<int>(most, at::get_num_threads());
    return x * weight;
  });
  DataParallel model(net, DataParallelOptions{.num_replicas = 2});
  model(random({4, 3}));
  EXPECT_EQ(most, 2);
  EXPECT_EQ(at::get_num_threads(), 4);
  at::set_num_threads(before);
}

TEST(DataParallel, DropoutWorksInAllReplicasAtOnce) {
  Cnn cnn(0.5);
  DataParallel model(cnn->drop, {.num_replicas = 4});
  for (int step = 0; step < 20; ++step) {
    auto x = torch::ones({64, 100}, torch::kDouble).requires_grad_();
    const auto y = model(x);
    y.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), y));  // 0 or 2, the same in backward
    const double kept = y.mean().item<double>() / 2;
    EXPECT_NEAR(kept, 0.5, 0.05);
    EXPECT_FALSE(torch::equal(y.narrow(0, 0, 16), y.narrow(0, 16, 16))) << "replicas have masks of their own";
  }
}

TEST(DataParallel, GradientsOfGradients) {
  auto net = std::make_shared<Nested>();
  auto alone = copy_of(net);
  DataParallel model(net, DataParallelOptions{.num_replicas = 3});
  const auto penalty = [](auto& module, Tensor& x) {
    const auto output = module.forward(x, std::pair(random({7, 5}), random({7, 1})), 0.7, std::string("a"));
    const auto gradient = torch::autograd::grad({weighted_sum(output)}, {x}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
    const auto again = torch::autograd::grad({gradient.pow(3).sum()}, {x}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
    (gradient.pow(2).sum() + again.pow(2).sum() + weighted_sum(output)).backward();
  };
  auto x = random({7, 6}).requires_grad_();
  auto other = x.detach().clone().requires_grad_();
  penalty(model, x);
  penalty(*alone, other);
  expect_close(x.grad(), other.grad());
  expect_same_gradients(*net, *alone);
}

TEST(DataParallel, SeveralForwardsOneBackward) {
  auto net = calling([](const Tensor& x, const Tensor& weight) { return (x * weight).tanh(); });
  auto alone = copy_of(net);
  DataParallel model(net, DataParallelOptions{.num_replicas = 2});
  const auto one = random({5, 3}, 1), two = random({4, 3}, 2);
  const auto loss = [&](auto& module) {
    return module.forward(one).sum() * module.forward(two).pow(2).sum();
  };
  loss(model).backward();
  loss(*alone).backward();
  expect_same_gradients(*net, *alone);

  auto kept = model(one).sum();
  kept.backward({}, /*retain_graph=*/true);
  kept.backward();
  alone->forward(one).mul(2).sum().backward();
  expect_same_gradients(*net, *alone);
  EXPECT_THAT(message_of<c10::Error>([&] { kept.backward(); }), HasSubstr("second time"));
}

TEST(DataParallel, BackwardNeedsNoWrapperAndRunsInAnyThread) {
  auto net = calling([](const Tensor& x, const Tensor& weight) { return x * weight; });
  Tensor loss;
  {
    DataParallel model(net, DataParallelOptions{.num_replicas = 2});
    loss = model(torch::ones({4, 3}, torch::kDouble)).sum();
  }
  std::thread([&] { loss.backward(); }).join();
  expect_close(net->weight.grad(), torch::full({3}, 4.0, torch::kDouble));
}

TEST(DataParallel, AChangeBetweenForwardAndBackwardIsNoticed) {
  auto net = calling([](const Tensor& x, const Tensor& weight) { return x * weight; });
  DataParallel model(net, DataParallelOptions{.num_replicas = 2});
  auto x = random({4, 3}).requires_grad_();
  const auto loss = model(x).sum();
  {
    torch::NoGradGuard no_grad;
    net->weight.add_(1);
  }
  EXPECT_THAT(
      message_of<c10::Error>([&] { loss.backward(); }),
      AllOf(HasSubstr("modified by an inplace operation"), HasSubstr("in the backward in replica 0")));
}

TEST(DataParallel, AForwardMayChangeItsInputsInPlace) {
  auto net = calling([](Tensor x, const Tensor& weight) { return x.mul_(2) * weight; });
  auto alone = copy_of(net);
  DataParallel model(net, DataParallelOptions{.num_replicas = 2});
  auto leaf = random({4, 3}).requires_grad_(), other = leaf.detach().clone().requires_grad_();
  model(leaf * 1).pow(2).sum().backward();
  alone->forward(other * 1).pow(2).sum().backward();
  expect_close(leaf.grad(), other.grad());
  expect_same_gradients(*net, *alone);
}

TEST(DataParallel, ErrorsNameTheReplica) {
  const auto failing = [](auto error) {
    return calling([error](const Tensor& x, const Tensor& weight) {
      if (x[0][0].item<double>() > 1) error(x[0][0].item<double>());
      return x * weight;
    });
  };
  const auto x = torch::arange(9, torch::kDouble).view({3, 3});  // replicas begin with 0, 3 and 6
  DataParallel index(failing([](double value) { TORCH_CHECK_INDEX(false, "no ", value); }),
                     DataParallelOptions{.num_replicas = 3});
  EXPECT_THAT(message_of<c10::IndexError>([&] { index(x); }),
              AllOf(HasSubstr("no 3"), HasSubstr("in replica 1 on device cpu")));
  DataParallel standard(failing([](double) { throw std::runtime_error("standard"); }),
                        DataParallelOptions{.num_replicas = 3});
  EXPECT_THAT(message_of<c10::Error>([&] { standard(x); }),
              AllOf(HasSubstr("standard"), HasSubstr("in replica 1 on device cpu")));
  EXPECT_TRUE(standard(torch::zeros({3, 3}, torch::kDouble)).defined()) << "it still works";

  std::function<void(const Tensor&)> in_backward = [](const Tensor& gradient) {
    TORCH_CHECK_VALUE(gradient[0][0].item<double>() < 5, "too much");
  };
  DataParallel late(
      calling([&](const Tensor& x, const Tensor& weight) { return doubled(x * weight, in_backward); }),
      DataParallelOptions{.num_replicas = 3});
  const auto loss = (late(x) * x).sum();
  EXPECT_THAT(message_of<c10::ValueError>([&] { loss.backward(); }),
              AllOf(HasSubstr("too much"), HasSubstr("in the backward in replica 2 on device cpu")));
}

}  // namespace
}  // namespace lockstep::data_parallel_backward_test

// Which modules DataParallel takes, with which arguments and results, and what it refuses.
#include <atomic>
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/data_parallel/testing/fixtures.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::data_parallel_modules_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::Calling;
using testing::calling;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using torch::Tensor;

TEST(DataParallel, ScattersAlongAnyDimensionAndMakesVectorsOfScalars) {
  DataParallel columns(calling([](const Tensor& x, const Tensor& weight) { return x * weight[0]; }),
                       DataParallelOptions{.dim = 1, .num_replicas = 3});
  const auto x = random({2, 7});
  expect_close(columns(x), x);
  DataParallel sums(calling([](const Tensor& x, const Tensor& weight) { return (x * weight).sum(); }),
                    DataParallelOptions{.num_replicas = 2});
  const auto y = torch::arange(9, torch::kDouble).view({3, 3});
  expect_close(sums(y), torch::tensor({15.0, 21.0}, torch::kDouble));
  EXPECT_EQ(sums(y.narrow(0, 0, 1)).sizes(), at::IntArrayRef({1}));
}

/// A struct that says what it holds, optional parts, plain data; a batch of rows without tensors to split.
struct Answer {
  Tensor sum;
  std::vector<Tensor> parts;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(sum), visit(parts);
  }
};
struct Structs : nn::Cloneable<Structs> {
  Structs() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({1}, torch::kDouble)); }
  std::pair<Answer, std::optional<Tensor>> forward(const std::vector<Tensor>& xs,
                                                   const std::vector<int>& rows, Tensor none) {
    EXPECT_FALSE(none.defined());
    EXPECT_EQ(rows.size(), 3U);
    return {{xs[0] * weight, {xs[1].sum(1), xs[1] + 1}}, xs[0] - 1};
  }
  Tensor weight;
};

TEST(DataParallel, TakesAndReturnsStructsAndContainers) {
  DataParallel model(std::make_shared<Structs>(), DataParallelOptions{.num_replicas = 2});
  const std::vector<Tensor> xs{random({3, 2}, 1), random({3, 4}, 2)};
  const auto [answer, more] = model(xs, std::vector<int>{1, 2, 3}, Tensor());
  expect_close(answer.sum, xs[0]);
  expect_close(answer.parts.at(0), xs[1].sum(1));
  expect_close(answer.parts.at(1), xs[1] + 1);
  expect_close(*more, xs[0] - 1);
  EXPECT_TRUE(answer.sum.requires_grad());
  EXPECT_FALSE(more->requires_grad());
}

struct Counting : nn::Cloneable<Counting> {
  void reset() override {}
  void forward() { ++calls; }
  static inline std::atomic<int> calls = 0;
};

TEST(DataParallel, CallsTheModuleItselfWithoutArgumentsOrDevices) {
  DataParallel counting(std::make_shared<Counting>(), DataParallelOptions{.num_replicas = 3});
  counting();
  EXPECT_EQ(Counting::calls, 1);
  if (torch::cuda::is_available()) GTEST_SKIP() << "all CUDA devices are the default";
  struct Plain : nn::Module {
    Tensor forward(const Tensor& x) { return x + 1; }
  };
  DataParallel alone(std::make_shared<Plain>());
  EXPECT_EQ(alone.device_ids().size(), 1U);
  EXPECT_EQ(alone.replicas_made(), 0);
  expect_close(alone(torch::zeros({2})), torch::ones({2}));
}

TEST(DataParallel, TakesAnyModuleAndSequentials) {
  nn::Sequential layers({{"in", nn::Linear(3, 4)}, {"out", nn::Linear(4, 2)}});
  layers->to(torch::kDouble);
  const auto x = random({5, 3});
  DataParallel any(nn::AnyModule(layers->ptr<nn::LinearImpl>(0)), {.num_replicas = 2});
  expect_close(any(x), layers[0]->as<nn::Linear>()->forward(x));
  DataParallel model(layers, {.num_replicas = 2});
  const auto y = model(x);
  expect_close(y, layers->forward(x));
  y.sum().backward();
  const auto gradient = layers->parameters()[0].grad().clone();
  layers->zero_grad();
  layers->forward(x).sum().backward();
  expect_close(gradient, layers->parameters()[0].grad());
}

TEST(DataParallel, TakesScriptModules) {
  torch::jit::Module script("Scripted");
  script.register_parameter("weight", torch::ones({3}, torch::requires_grad().dtype(torch::kDouble)), false);
  script.register_buffer("seen", torch::zeros({1}));
  script.register_attribute("training", c10::BoolType::get(), true);
  script.define(R"(
    def forward(self, x: Tensor, pair: Tuple[Tensor, int]):
      if self.training:
        self.seen.add_(x.size(0))
      return {"y": [x * self.weight + pair[0]]}, pair[1]
  )");
  DataParallel model(script, {.num_replicas = 2});
  const auto x = random({5, 3});
  const auto pair = c10::ivalue::Tuple::create({random({5, 3}, 2), 7});
  const auto output = model(x, pair).toTuple();
  EXPECT_EQ(output->elements()[1].toInt(), 7);
  const auto y = output->elements()[0].toGenericDict().at("y").toTensorVector().at(0);
  expect_close(y, x + random({5, 3}, 2));
  EXPECT_EQ(script.attr("seen").toTensor().item<float>(), 3);
  y.sum().backward();
  expect_close(script.attr("weight").toTensor().grad(), x.sum(0));
  model.eval();
  model.forward({x, pair});
  EXPECT_EQ(script.attr("seen").toTensor().item<float>(), 3);
  EXPECT_TRUE(torch::equal(pair->elements()[0].toTensor(), random({5, 3}, 2)))
      << "the argument stays as it was";
}

struct NotCloneable : nn::Module {
  NotCloneable() { weight = register_parameter("weight", torch::randn({3})); }
  Tensor forward(const Tensor& x) { return x * weight; }
  Tensor weight;
};
struct Parent : nn::Cloneable<Parent> {
  Parent() { reset(); }
  void reset() override { child = register_module("child", std::make_shared<NotCloneable>()); }
  Tensor forward(const Tensor& x) { return child->forward(x); }
  std::shared_ptr<NotCloneable> child;
};

TEST(DataParallel, NamesWhatCannotBeCloned) {
  const DataParallelOptions two{.num_replicas = 2};
  EXPECT_THAT(message_of<c10::Error>([&] { DataParallel(std::make_shared<NotCloneable>(), two); }),
              AllOf(HasSubstr("NotCloneable"), HasSubstr("Cloneable"), HasSubstr("2 replicas")));
  EXPECT_THAT(message_of<c10::Error>([&] { DataParallel(std::make_shared<Parent>(), two); }),
              AllOf(HasSubstr("submodule 'child'"), HasSubstr("NotCloneable"), HasSubstr("'weight'"),
                    HasSubstr("torch::nn::Cloneable<")));
}

TEST(DataParallel, RefusesWhatDoesNotFit) {
  const auto identity = calling([](const Tensor& x, const Tensor&) { return x; });
  const auto refusal = [&](const DataParallelOptions& options) {
    return message_of<c10::ValueError>([&] { DataParallel(identity, options); });
  };
  EXPECT_THAT(refusal({.num_replicas = -1}), HasSubstr("num_replicas is -1"));
  EXPECT_THAT(refusal({.device_ids = {at::kCPU}, .num_replicas = 2}), HasSubstr("one of them"));
  EXPECT_THAT(refusal({.device_ids = {at::kCPU, at::Device("cuda:0")}}), HasSubstr("cuda:0"));
  EXPECT_THAT(refusal({.device_ids = {{at::kCUDA, 99}, {at::kCUDA, 98}}}), HasSubstr("cuda:99"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { DataParallel(std::shared_ptr<Calling>(), {}); }),
              HasSubstr("no module"));

  DataParallel structs(std::make_shared<Structs>(), DataParallelOptions{.num_replicas = 3});
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                structs(std::vector<Tensor>{random({6, 2}), random({4, 2})}, std::vector<int>(3), Tensor());
              }),
              AllOf(HasSubstr("[6, 2] gives 3"), HasSubstr("[4, 2] gives 2")));
  DataParallel model(identity, DataParallelOptions{.num_replicas = 2});
  EXPECT_THAT(message_of<c10::ValueError>([&] { model(torch::tensor(1.0)); }), HasSubstr("no dimensions"));

  struct Ragged : nn::Cloneable<Ragged> {
    void reset() override {}
    std::vector<Tensor> forward(const Tensor& x) { return std::vector<Tensor>(x.size(0), x); }
  };
  DataParallel ragged(std::make_shared<Ragged>(), DataParallelOptions{.num_replicas = 2});
  EXPECT_THAT(message_of<c10::Error>([&] {
                ragged(random({3, 2}));
              }),
              AllOf(HasSubstr("replica 1 returned a list of size 1"), HasSubstr("list of size 2")));
  struct Sizes : nn::Cloneable<Sizes> {
    void reset() override {}
    std::pair<Tensor, int64_t> forward(const Tensor& x) { return {x, x.size(0)}; }
  };
  DataParallel sizes(std::make_shared<Sizes>(), DataParallelOptions{.num_replicas = 2});
  EXPECT_THAT(message_of<c10::Error>([&] { sizes(random({3, 2})); }), HasSubstr("not a tensor"));
  EXPECT_EQ(sizes(random({4, 2})).second, 2);
}

}  // namespace
}  // namespace lockstep::data_parallel_modules_test

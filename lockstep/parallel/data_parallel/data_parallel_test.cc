#include <condition_variable>
#include <gmock/gmock.h>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::data_parallel_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using torch::Tensor;

constexpr double kBound = 1e-10;

/// A tied weight, a frozen one, an unused one, several arguments and a nest of outputs.
struct Nested : nn::Cloneable<Nested> {
  using Output = std::tuple<Tensor, std::vector<Tensor>, std::map<std::string, std::pair<Tensor, int>>>;
  Nested() { reset(); }
  void reset() override {
    ++made;
    first = register_module("first", nn::Linear(6, 5));
    last = register_module("last", nn::Linear(5, 6));
    tied = register_parameter("tied", first->weight);
    frozen = register_parameter("frozen", torch::randn({6}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::randn({2}));
    to(torch::kDouble);
  }
  Output forward(const Tensor& x, std::pair<Tensor, Tensor> more, double scale, const std::string& name) {
    const auto hidden = torch::tanh(first(x) + more.first) * scale;
    const auto y = last(hidden) * frozen + torch::matmul(hidden, tied);
    return {y, {hidden, y.sum(1)}, {{name, {y * more.second, 3}}}};
  }
  nn::Linear first{nullptr}, last{nullptr};
  Tensor tied, frozen, unused;
  static inline std::atomic<int> made = 0;
};

/// A convolution with batch normalisation and dropout that tests switch on.
struct CnnImpl : nn::Cloneable<CnnImpl> {
  explicit CnnImpl(double dropout = 0) : rate(dropout) { reset(); }
  void reset() override {
    convolution = register_module("convolution", nn::Conv2d(nn::Conv2dOptions(1, 3, 3).bias(false)));
    norm = register_module("norm", nn::BatchNorm2d(3));
    drop = register_module("drop", nn::Dropout(rate));
    last = register_module("last", nn::Linear(3 * 4 * 4, 4));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return last(drop(torch::relu(norm(convolution(x)))).flatten(1)); }
  double rate;
  nn::Conv2d convolution{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Dropout drop{nullptr};
  nn::Linear last{nullptr};
};
TORCH_MODULE(Cnn);

/// Does what a test says.
struct Calling : nn::Cloneable<Calling> {
  using Function = std::function<Tensor(const Tensor& x, const Tensor& weight)>;
  explicit Calling(Function act) : act(std::move(act)) { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({3}, torch::kDouble)); }
  Tensor forward(const Tensor& x) { return act(x, weight); }
  Function act;
  Tensor weight;
};
std::shared_ptr<Calling> calling(Calling::Function act) {
  return std::make_shared<Calling>(std::move(act));
}

/// A module with the same values, to train alone. (A clone() would not tie the weight.)
std::shared_ptr<Nested> copy_of(const std::shared_ptr<Nested>& net) {
  auto copy = std::make_shared<Nested>();
  copy->to(net->tied.device());
  const torch::NoGradGuard no_grad;
  const auto values = net->named_parameters();
  for (auto& item : copy->named_parameters()) item.value().copy_(values[item.key()]);
  return copy;
}
std::shared_ptr<Calling> copy_of(const std::shared_ptr<Calling>& net) {
  return calling(net->act);
}

void expect_close(const Tensor& actual, const Tensor& expected, const std::string& what = "") {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_EQ(actual.dtype(), expected.dtype()) << what;
  if (actual.numel() == 0) return;
  const double bound = kBound * std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((actual - expected).abs().max().item<double>(), bound) << what;
}

template <class One, class Other>
void expect_same_gradients(const One& one, const Other& other) {
  const auto expected = other.named_parameters();
  for (const auto& item : one.named_parameters()) {
    expect_close(item.value().grad(), expected[item.key()].grad(), "gradient of " + item.key());
  }
}

/// A fixed function of all tensors in an output.
template <class Output>
Tensor weighted_sum(const Output& output) {
  auto sum = torch::zeros({}, torch::kDouble);
  int seed = 100;
  for_each_tensor(output, [&](const Tensor& tensor) {
    sum = sum + (tensor.to(torch::kDouble) * random(tensor.sizes(), seed++)).sum();
  });
  return sum;
}

TEST(DataParallel, ComputesWhatTheFullBatchGives) {
  for (const int64_t replicas : {2, 3, 4}) {
    for (const int64_t batch : {8, 7, 5, 3, 2, 1, 0}) {
      SCOPED_TRACE(std::to_string(replicas) + " replicas, batch of " + std::to_string(batch));
      auto net = std::make_shared<Nested>();
      auto alone = copy_of(net);
      DataParallel model(net, DataParallelOptions{.num_replicas = replicas});
      std::vector<Tensor> mine, others;
      for (auto* inputs : {&mine, &others}) {
        *inputs = {random({batch, 6}, 1).requires_grad_(), random({batch, 5}, 2).requires_grad_(),
                   random({batch, 1}, 3)};
      }
      const auto run = [](auto& module, const std::vector<Tensor>& x) {
        return module.forward(x[0], std::pair(x[1], x[2]), 1.5, std::string("name"));
      };
      const auto output = run(model, mine);
      const auto expected = run(*alone, others);
      expect_close(std::get<0>(output), std::get<0>(expected));
      ASSERT_EQ(std::get<1>(output).size(), 2U);
      for (size_t i = 0; i < 2; ++i) expect_close(std::get<1>(output)[i], std::get<1>(expected)[i]);
      expect_close(std::get<2>(output).at("name").first, std::get<2>(expected).at("name").first);
      EXPECT_EQ(std::get<2>(output).at("name").second, 3);
      weighted_sum(output).backward();
      weighted_sum(expected).backward();
      expect_same_gradients(*net, *alone);
      EXPECT_FALSE(net->unused.grad().defined());
      for (size_t i = 0; i < mine.size(); ++i) expect_close(mine[i].grad(), others[i].grad());
    }
  }
}

TEST(DataParallel, TrainsAsTheModuleAloneAndTheSameEveryTime) {
  std::vector<std::vector<Tensor>> runs;
  for (int run = 0; run < 2; ++run) {
    torch::manual_seed(1);
    auto net = std::make_shared<Nested>();
    auto alone = copy_of(net);
    DataParallel model(net, DataParallelOptions{.num_replicas = 3});
    torch::optim::Adam optimizer(model.parameters(), 1e-2);
    torch::optim::Adam of_alone(alone->parameters(), 1e-2);
    for (int step = 0; step < 20; ++step) {
      const auto x = random({10, 6}, step);
      const auto more = std::pair(random({10, 5}, step + 50), random({10, 1}, step + 90));
      optimizer.zero_grad(), of_alone.zero_grad();
      weighted_sum(model(x, more, 0.5, "a")).backward();
      weighted_sum(alone->forward(x, more, 0.5, "a")).backward();
      optimizer.step(), of_alone.step();
    }
    runs.emplace_back();
    const auto expected = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      expect_close(item.value(), expected[item.key()], item.key());
      runs.back().push_back(item.value());
    }
  }
  for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(torch::equal(runs[0][i], runs[1][i]));
}

TEST(DataParallel, MakesItsReplicasOnce) {
  auto net = std::make_shared<Nested>();
  Nested::made = 0;
  DataParallel model(net, DataParallelOptions{.num_replicas = 4});
  torch::optim::SGD optimizer(model.parameters(), 1e-3);
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const auto output = model(random({8, 6}, step), std::pair(random({8, 5}), random({8, 1})), 1.0, "a");
    std::get<0>(output).sum().backward();
    optimizer.step();
  }
  EXPECT_EQ(Nested::made, 4);
  EXPECT_EQ(model.replicas_made(), 4);
  model.replicate();
  EXPECT_EQ(Nested::made, 8);
}

TEST(DataParallel, ReplicasShareTheParametersMemory) {
  std::mutex mutex;
  std::set<const void*> memory;
  std::set<at::TensorImpl*> tensors;
  auto net = calling([&](const Tensor& x, const Tensor& weight) {
    const std::lock_guard<std::mutex> lock(mutex);
    memory.insert(weight.const_data_ptr()), tensors.insert(weight.unsafeGetTensorImpl());
    return x * weight;
  });
  DataParallel model(net, DataParallelOptions{.num_replicas = 3});
  model(random({3, 3}));
  EXPECT_EQ(memory, std::set<const void*>{net->weight.const_data_ptr()});
  EXPECT_EQ(tensors.size(), 3U);
}

TEST(DataParallel, LeavesTheDefaultGeneratorAlone) {
  auto net = std::make_shared<Nested>();
  torch::manual_seed(5);
  const auto expected = torch::rand({3});
  torch::manual_seed(5);
  DataParallel model(net, DataParallelOptions{.num_replicas = 2});
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
}

TEST(DataParallel, FollowsToLoadAndInPlaceChanges) {
  Cnn cnn;
  cnn->eval();
  DataParallel model(cnn, {.num_replicas = 2});
  const auto x = random({5, 1, 6, 6});
  const auto check = [&](const Tensor& input, const std::string& what) {
    const auto output = model(input);
    const auto expected = cnn->forward(input);
    EXPECT_EQ(output.dtype(), expected.dtype());
    EXPECT_TRUE(torch::allclose(output, expected)) << what;
  };
  check(x, "at first");
  {
    torch::NoGradGuard no_grad;
    cnn->last->weight.mul_(3);
    cnn->norm->running_mean.add_(0.5);
  }
  check(x, "changed in place");
  std::stringstream file;
  torch::save(Cnn(), file);
  torch::load(cnn, file);
  check(x, "loaded");
  cnn->to(torch::kFloat);
  check(x.to(torch::kFloat), "float");
  cnn->to(torch::kDouble);
  cnn->last->weight.set_data(random({4, 48}, 9));
  check(x, "other memory");
  EXPECT_EQ(model.replicas_made(), 2);
}

TEST(DataParallel, FollowsTrainingModeAndKeepsTheFirstReplicasBuffers) {
  Cnn cnn, first;
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < cnn->parameters().size(); ++i) first->parameters()[i].copy_(cnn->parameters()[i]);
  }
  DataParallel model(cnn, {.num_replicas = 2});
  for (int step = 0; step < 3; ++step) {
    const auto x = random({7, 1, 6, 6}, step);
    const auto y = model(x);
    first->forward(x.narrow(0, 0, 4));  // the first chunk of seven
    expect_close(cnn->norm->running_mean, first->norm->running_mean);
    expect_close(cnn->norm->running_var, first->norm->running_var);
    EXPECT_EQ(cnn->norm->num_batches_tracked.item<int64_t>(), step + 1);
    expect_close(y.narrow(0, 0, 4), first->forward(x.narrow(0, 0, 4)));
    first->norm->running_mean.copy_(cnn->norm->running_mean);
    first->norm->running_var.copy_(cnn->norm->running_var);
  }
  model.eval();
  const auto x = random({7, 1, 6, 6}, 8);
  expect_close(model(x), cnn->forward(x), "all replicas have the first one's statistics");
  model.train();
  cnn->norm->eval();
  const auto before = cnn->norm->running_mean.clone();
  expect_close(model(x), cnn->forward(x), "a submodule in another mode");
  EXPECT_TRUE(torch::equal(cnn->norm->running_mean, before));
}

TEST(DataParallel, FollowsRequiresGradAndNewSubmodules) {
  nn::Sequential layers({{"one", nn::Linear(3, 3)}, {"two", nn::Linear(3, 3)}});
  layers->to(torch::kDouble);
  DataParallel model(layers, {.num_replicas = 2});
  const auto x = random({4, 3});
  layers->parameters()[0].set_requires_grad(false);
  model(x).sum().backward();
  EXPECT_FALSE(layers->parameters()[0].grad().defined());
  EXPECT_TRUE(layers->parameters()[2].grad().defined());
  layers->push_back(nn::Tanh());
  expect_close(model(x), layers->forward(x));
  EXPECT_EQ(model.replicas_made(), 4);
}

TEST(DataParallel, RecordsNothingWithoutGradients) {
  Cnn cnn;
  DataParallel model(cnn, {.num_replicas = 2});
  model.eval();
  const auto x = random({4, 1, 6, 6});
  {
    torch::NoGradGuard no_grad;
    const auto y = model(x);
    EXPECT_FALSE(y.requires_grad());
    expect_close(y, cnn->forward(x));
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(model(x).is_inference());
  }
  EXPECT_TRUE(model(x).requires_grad());
}

/// All threads that call arrive() go on together, or get false after a minute.
class Meeting {
 public:
  explicit Meeting(int count) : missing_(count) {}
  bool arrive() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) all_.notify_all();
    return all_.wait_for(lock, std::chrono::minutes(1), [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int missing_;
};

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

TEST(DataParallel, FollowsOnCudaDevices) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a CUDA device";
  // Two replicas on one device do what replicas on two devices do, but for the copies between them.
  const auto last = static_cast<at::DeviceIndex>(torch::cuda::device_count() - 1);
  const at::Device first(at::kCUDA, 0), second(at::kCUDA, last);
  auto net = std::make_shared<Nested>();
  net->to(first);
  auto alone = copy_of(net);
  DataParallel model(net, DataParallelOptions{.device_ids = {first, second}});
  torch::optim::SGD optimizer(model.parameters(), 1e-2), of_alone(alone->parameters(), 1e-2);
  for (int step = 0; step < 5; ++step) {
    const auto x = random({7, 6}, step).to(first);
    const auto more = std::pair(random({7, 5}, step).to(first), random({7, 1}, step).to(first));
    optimizer.zero_grad(), of_alone.zero_grad();
    const auto sum_of = [](const auto& output) { return std::get<0>(output).pow(2).sum(); };
    sum_of(model(x, more, 0.5, "a")).backward();
    sum_of(alone->forward(x, more, 0.5, "a")).backward();
    expect_same_gradients(*net, *alone);
    optimizer.step(), of_alone.step();
  }
  net->to(at::kCPU);
  EXPECT_THAT(message_of<c10::Error>([&] {
                model(random({4, 6}), std::pair(random({4, 5}), random({4, 1})), 1.0, "a");
              }),
              HasSubstr("on device cuda:0 (device_ids[0])"));
}

}  // namespace
}  // namespace lockstep::data_parallel_test

#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/nn/wrapped_module.h>

namespace lockstep::wrapped_module_test {
namespace {

namespace nn = torch::nn;
using ::testing::ElementsAre;

/// What DistributedDataParallel and DataParallel look like from outside.
template <class T>
class Wrapper : public nn::Module {
  using Trait = WrappedModule<T>;

 public:
  struct Options {
    int number = 0;
  };
  explicit Wrapper(typename Trait::Handle wrapped, Options options = {})
      : module(std::move(wrapped)), number(options.number) {
    register_module("module", Trait::as_module(module));
  }
  template <ModuleHolderOf<T> Holder>
  explicit Wrapper(const Holder& holder, Options options = {}) : Wrapper(holder.ptr(), options) {}

  template <class... Arguments>
  requires(!Trait::kReturnTypeIsAsked) auto forward(Arguments&&... arguments) {
    return Trait::forward(module, std::forward<Arguments>(arguments)...);
  }
  template <class ReturnType = at::Tensor, class... Arguments>
  requires Trait::kReturnTypeIsAsked auto forward(Arguments&&... arguments) {
    return Trait::template forward<ReturnType>(module, std::forward<Arguments>(arguments)...);
  }
  c10::IValue forward(std::vector<c10::IValue> arguments) requires std::same_as<T, torch::jit::Module> {
    return Trait::forward(module, std::move(arguments));
  }

  const typename Trait::Handle module;
  const int number;
};
template <class Given>
Wrapper(Given&&) -> Wrapper<ContainedModule<Given>>;
template <class Given, class Options>
Wrapper(Given&&, Options) -> Wrapper<ContainedModule<Given>>;

struct Net : nn::Module {
  Net() { register_module("layer", layer), register_module("norm", norm); }
  std::pair<torch::Tensor, int> forward(const torch::Tensor& x, int times) {
    return {norm(layer(x)) * times, times};
  }
  nn::Linear layer{3, 2};
  nn::BatchNorm1d norm{2};
};

/// A forward that is a template on its argument, whose return type can't be asked for.
struct Generic : nn::Module {
  template <class X>
  X forward(const X& x) {
    return x + x;
  }
};

struct TwoOutputsImpl : nn::Cloneable<TwoOutputsImpl> {
  void reset() override { weight = register_parameter("weight", torch::ones({2})); }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    return {x * weight, x + weight};
  }
  torch::Tensor weight;
  TwoOutputsImpl() { reset(); }
};
TORCH_MODULE(TwoOutputs);

static_assert(std::is_same_v<ContainedModule<std::shared_ptr<Net>&>, Net>);
static_assert(std::is_same_v<ContainedModule<const nn::Linear&>, nn::LinearImpl>);
static_assert(std::is_same_v<ContainedModule<TwoOutputs>, TwoOutputsImpl>);
static_assert(std::is_same_v<ContainedModule<nn::Sequential>, nn::SequentialImpl>);
static_assert(std::is_same_v<ContainedModule<nn::AnyModule>, nn::AnyModule>);
static_assert(std::is_same_v<ContainedModule<torch::jit::script::Module>, torch::jit::Module>);
template <class T>
concept Wrappable = requires {
  typename ContainedModule<T>;
};
static_assert(!Wrappable<Net>, "a module by value could not be shared with its owner");
static_assert(!Wrappable<int> && !Wrappable<std::shared_ptr<int>>);
static_assert(WrappedModule<nn::SequentialImpl>::kReturnTypeIsAsked);
static_assert(!WrappedModule<Net>::kReturnTypeIsAsked && !WrappedModule<Generic>::kReturnTypeIsAsked);
static_assert(std::is_same_v<WrappedModule<nn::Linear>::Handle, std::shared_ptr<nn::LinearImpl>>);

std::vector<std::string> names(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> answer;
  for (const auto& item : tensors) answer.push_back(item.first);
  return answer;
}

/// Whether the wrapper's parameters are the wrapped module's own, by one SGD step through it.
template <class Model, class Wrapped>
void expect_a_step_reaches_the_module(Model& model, const Wrapped& handle,
                                      const std::function<torch::Tensor()>& loss) {
  std::vector<torch::Tensor> before;
  const auto parameters = WrappedModule<ContainedModule<Wrapped>>::named_parameters(handle);
  ASSERT_FALSE(parameters.empty());
  for (const auto& item : parameters) before.push_back(item.second.detach().clone());
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  optimizer.zero_grad();
  loss().backward();
  optimizer.step();
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i].second.grad().defined()) << parameters[i].first;
    EXPECT_TRUE(torch::allclose(parameters[i].second, before[i] - 0.1 * parameters[i].second.grad()));
  }
}

TEST(WrappedModule, APlainModuleInASharedPointer) {
  auto net = std::make_shared<Net>();
  Wrapper model(net, Wrapper<Net>::Options{.number = 7});
  EXPECT_EQ(model.number, 7);
  EXPECT_EQ(model.module, net);
  using Trait = WrappedModule<Net>;
  EXPECT_THAT(names(Trait::named_parameters(net)),
              ElementsAre("layer.weight", "layer.bias", "norm.weight", "norm.bias"));
  EXPECT_THAT(names(Trait::named_buffers(net)),
              ElementsAre("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"));
  const auto x = torch::randn({5, 3});
  model.eval();
  EXPECT_FALSE(Trait::is_training(net));
  const auto [y, times] = model.forward(x, 3);
  EXPECT_TRUE(torch::equal(y, net->forward(x, 3).first));
  EXPECT_EQ(times, 3);
  expect_a_step_reaches_the_module(model, net, [&] { return model.forward(x, 2).first.pow(2).sum(); });
  EXPECT_EQ(Wrapper(std::make_shared<Generic>()).forward(21), 42);
  EXPECT_TRUE(Trait::is_empty(nullptr));
}

TEST(WrappedModule, AHolder) {
  nn::Linear linear(3, 2);
  Wrapper model(linear);
  static_assert(std::is_same_v<decltype(model), Wrapper<nn::LinearImpl>>);
  EXPECT_EQ(model.module, linear.ptr());
  const auto x = torch::randn({5, 3});
  EXPECT_TRUE(torch::equal(model.forward(x), linear(x)));
  Wrapper<nn::LinearImpl> named(linear, {.number = 2});
  EXPECT_EQ(named.number, 2);
  TwoOutputs two;
  Wrapper pair(two);
  EXPECT_TRUE(torch::equal(std::get<1>(pair.forward(torch::ones({2}))), torch::full({2}, 2.0)));
  expect_a_step_reaches_the_module(pair, pair.module,
                                   [&] { return std::get<0>(pair.forward(torch::ones({2}))).sum(); });
  EXPECT_THROW(Wrapper(nn::Linear(nullptr)), c10::Error);
}

TEST(WrappedModule, ASequentialReturnsWhatItIsAsked) {
  nn::Sequential layers(nn::Linear(3, 2), nn::ReLU());
  Wrapper model(layers);
  const auto x = torch::randn({5, 3});
  EXPECT_TRUE(torch::equal(model.forward(x), layers->forward(x)));
  expect_a_step_reaches_the_module(model, model.module, [&] { return model.forward(x).sum(); });
  nn::Sequential two(nn::Linear(3, 2), TwoOutputs());
  using Pair = std::tuple<torch::Tensor, torch::Tensor>;
  Wrapper pair(two);
  EXPECT_TRUE(torch::equal(std::get<0>(pair.forward<Pair>(x)), std::get<0>(two->forward<Pair>(x))));
  EXPECT_THROW(pair.forward(x), c10::Error) << "a tuple is not a Tensor";
}

TEST(WrappedModule, AnAnyModule) {
  nn::AnyModule any(nn::Linear(3, 2));
  Wrapper model(any);
  const auto x = torch::randn({5, 3});
  EXPECT_TRUE(torch::equal(model.forward(x), any.forward(x)));
  EXPECT_EQ(model.named_parameters().keys()[0], "module.weight");
  model.eval();
  EXPECT_FALSE(any.ptr()->is_training());
  expect_a_step_reaches_the_module(model, any, [&] { return model.forward(x).sum(); });
  Wrapper two{nn::AnyModule(TwoOutputs())};
  using Pair = std::tuple<torch::Tensor, torch::Tensor>;
  EXPECT_TRUE(torch::equal(std::get<1>(two.forward<Pair>(x.narrow(1, 0, 2))), x.narrow(1, 0, 2) + 1));
  EXPECT_TRUE(WrappedModule<nn::AnyModule>::is_empty({}));
  auto copy = WrappedModule<nn::AnyModule>::clone(any);
  EXPECT_NE(copy.ptr(), any.ptr());
  EXPECT_TRUE(torch::equal(copy.forward(x), any.forward(x)));
}

/// A script module with a parameter and a buffer, in a submodule with a batch counter.
torch::jit::Module script_module() {
  torch::jit::Module inner("Inner");
  inner.register_parameter("weight", torch::randn({3}, torch::requires_grad()), /*is_buffer=*/false);
  inner.register_buffer("seen", torch::zeros({1}));
  inner.register_attribute("training", c10::BoolType::get(), true);
  inner.define(R"(
    def forward(self, x: Tensor):
      if self.training:
        self.seen.add_(1)
      return x * self.weight
  )");
  torch::jit::Module outer("Outer");
  outer.register_module("inner", inner);
  outer.register_parameter("bias", torch::randn({3}, torch::requires_grad()), /*is_buffer=*/false);
  outer.register_parameter("frozen", torch::ones({3}), /*is_buffer=*/false);
  outer.register_attribute("training", c10::BoolType::get(), true);
  outer.define(R"(
    def forward(self, x: Tensor, scale: float = 1.0):
      y = self.inner.forward(x) + self.bias * self.frozen
      return {"y": y * scale, "x": x}
  )");
  return outer;
}

TEST(WrappedModule, AScriptModule) {
  auto script = script_module();
  Wrapper model(script);
  using Trait = WrappedModule<torch::jit::Module>;
  const auto x = torch::randn({5, 3});
  const auto expected = script.forward({x, 2.0}).toGenericDict().at("y").toTensor();
  const auto y = [](const c10::IValue& output) { return output.toGenericDict().at("y").toTensor(); };
  EXPECT_TRUE(torch::equal(y(model.forward(x, 2.0)), expected));
  EXPECT_TRUE(torch::equal(y(model.forward({x, 2.0})), expected));
  EXPECT_TRUE(torch::equal(y(Trait::forward(script, {x}, {{"scale", 2.0}})), expected));

  const auto parameters = Trait::named_parameters(script);
  EXPECT_THAT(names(parameters), ::testing::UnorderedElementsAre("inner.weight", "bias", "frozen"));
  EXPECT_THAT(names(Trait::named_buffers(script)), ElementsAre("inner.seen"));
  const auto registered = model.named_parameters();
  ASSERT_EQ(registered.size(), parameters.size());
  for (const auto& [name, tensor] : parameters) {
    EXPECT_TRUE(tensor.is_same(*registered.find("module." + name))) << name;
    EXPECT_EQ(tensor.requires_grad(), name != "frozen");
  }

  EXPECT_EQ(Trait::named_buffers(script)[0].second.item<float>(), 4);
  model.eval();
  EXPECT_FALSE(Trait::is_training(script));
  model.forward(x);
  EXPECT_EQ(Trait::named_buffers(script)[0].second.item<float>(), 4);
  Trait::train(script);
  EXPECT_TRUE(script.is_training() && Trait::as_module(script)->is_training());

  y(model.forward(x)).sum().backward();
  EXPECT_TRUE(torch::allclose(script.attr("bias").toTensor().grad(), torch::full({3}, 5.0)));
  model.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(script.attr("bias").toTensor().grad().sum().item<float>(), 0);
  model.to(torch::kDouble);
  EXPECT_EQ(y(script.forward({x.to(torch::kDouble)})).scalar_type(), torch::kDouble);

  auto copy = Trait::clone(script, at::kCPU);
  for (const auto& [name, tensor] : Trait::named_parameters(copy)) {
    EXPECT_TRUE(tensor.is_leaf()) << name;
    EXPECT_EQ(tensor.requires_grad(), name != "frozen") << name;
  }
  torch::NoGradGuard no_grad;
  copy.attr("bias").toTensor().add_(1);
  EXPECT_FALSE(torch::equal(copy.attr("bias").toTensor(), script.attr("bias").toTensor()));
  EXPECT_TRUE(Trait::is_empty(torch::jit::Module()));
  EXPECT_FALSE(Trait::is_empty(script));
}

TEST(WrappedModule, SavesAsThePlainModule) {
  nn::Sequential layers(nn::Linear(3, 2), nn::BatchNorm1d(2));
  Wrapper model(layers);
  std::stringstream file;
  torch::save(model.module, file);
  nn::Sequential other(nn::Linear(3, 2), nn::BatchNorm1d(2));
  torch::load(other, file);
  for (size_t i = 0; i < layers->parameters().size(); ++i)
    EXPECT_TRUE(torch::equal(layers->parameters()[i], other->parameters()[i]));
}

}  // namespace
}  // namespace lockstep::wrapped_module_test

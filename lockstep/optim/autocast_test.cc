#include <gmock/gmock.h>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/device/cuda_library.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::autocast_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

/// The dtype in which a product of two float32 matrices comes out.
at::ScalarType product_dtype() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

TEST(Autocast, ChoosesADtypeForEachOperation) {
  EXPECT_EQ(product_dtype(), at::kFloat);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    auto guard = autocast(at::kCPU, {.dtype = dtype});
    const auto product = torch::mm(torch::ones({2, 2}), torch::ones({2, 2}));
    EXPECT_EQ(product.scalar_type(), dtype);
    EXPECT_EQ(nn::functional::mse_loss(product, torch::ones({2, 2})).scalar_type(), at::kFloat);
    EXPECT_EQ((product + torch::ones({2, 2})).scalar_type(), at::kFloat);
    EXPECT_EQ(torch::mm(torch::ones({2, 2}, at::kDouble), torch::ones({2, 2}, at::kDouble)).scalar_type(),
              at::kDouble);
    EXPECT_TRUE(is_autocast_enabled(at::kCPU));
    EXPECT_FALSE(is_autocast_enabled(at::kCUDA));
  }
  EXPECT_EQ(product_dtype(), at::kFloat);
  EXPECT_FALSE(is_autocast_enabled(at::kCPU));
}

TEST(Autocast, DefaultsAreTorchs) {
  EXPECT_EQ(get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_EQ(get_autocast_dtype(at::kCUDA), at::kHalf);
  EXPECT_TRUE(is_autocast_available(at::kCPU));
  EXPECT_TRUE(is_autocast_available(at::kCUDA));
  EXPECT_FALSE(is_autocast_available(at::kMeta));
  auto guard = autocast(at::kCPU);
  EXPECT_EQ(product_dtype(), at::kBFloat16);
}

TEST(Autocast, ScopesNestAndRestoreWhatWasBefore) {
  {
    auto outer = autocast(at::kCPU, {.dtype = at::kHalf});
    EXPECT_EQ(product_dtype(), at::kHalf);
    {
      auto off = autocast(at::kCPU, {.enabled = false});
      EXPECT_EQ(product_dtype(), at::kFloat);
      {
        auto on = autocast(at::kCPU);
        EXPECT_EQ(product_dtype(), at::kHalf) << "the dtype of the enclosing scope";
        auto other = autocast(at::kCPU, {.dtype = at::kBFloat16});
        EXPECT_EQ(product_dtype(), at::kBFloat16);
      }
      EXPECT_EQ(product_dtype(), at::kFloat);
    }
    EXPECT_EQ(product_dtype(), at::kHalf);
    EXPECT_THROW(
        {
          auto inner = autocast(at::kCPU, {.dtype = at::kBFloat16});
          throw std::runtime_error("leave");
        },
        std::runtime_error);
    EXPECT_EQ(product_dtype(), at::kHalf);
  }
  EXPECT_EQ(product_dtype(), at::kFloat);
  EXPECT_EQ(get_autocast_dtype(at::kCPU), at::kBFloat16);
}

TEST(Autocast, ParametersAreCastOnceUntilTheOutermostScopeEnds) {
  const auto weight = torch::ones({3, 3}, torch::requires_grad());
  const auto x = torch::ones({1, 3});
  const auto output_is_zero = [&] { return torch::mm(x, weight).eq(0).all().item<bool>(); };
  {
    auto outer = autocast(at::kCPU);
    EXPECT_FALSE(output_is_zero());
    weight.data().zero_();
    EXPECT_FALSE(output_is_zero()) << "the cast of before is used";
    {
      auto inner = autocast(at::kCPU, {.cache_enabled = false});
      EXPECT_TRUE(output_is_zero()) << "cast anew";
      auto innermost = autocast(at::kCPU);
      EXPECT_TRUE(output_is_zero()) << "as around: no cache";
    }
    EXPECT_FALSE(output_is_zero()) << "an inner scope's end drops nothing";
  }
  auto again = autocast(at::kCPU);
  EXPECT_TRUE(output_is_zero());
}

TEST(Autocast, WhatTheCpuDoesNotSupportIsDisabledWithAWarning) {
  ::testing::internal::CaptureStderr();
  {
    auto guard = autocast(at::kCPU, {.dtype = at::kDouble});
    EXPECT_FALSE(is_autocast_enabled(at::kCPU));
    EXPECT_EQ(product_dtype(), at::kFloat);
  }
  const auto text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text,
              AllOf(HasSubstr("In CPU autocast, but the target dtype is not supported. Disabling autocast."),
                    HasSubstr("CPU Autocast only supports dtypes of torch.bfloat16, torch.float16 "
                              "currently; it is Double")));
  EXPECT_EQ(get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_THAT(message_of<c10::Error>([] { auto guard = autocast(at::kMeta); }),
              HasSubstr("User specified an unsupported autocast device_type 'meta'"));
  if (cuda_device_count() > 0) return;
  auto guard = autocast(at::kCUDA);
  EXPECT_FALSE(is_autocast_enabled(at::kCUDA));
}

TEST(Autocast, BelongsToTheThread) {
  auto guard = autocast(at::kCPU);
  at::ScalarType elsewhere = at::kByte;
  std::thread([&] { elsewhere = product_dtype(); }).join();
  EXPECT_EQ(elsewhere, at::kFloat);
}

struct Noting : nn::Cloneable<Noting> {
  Noting() { reset(); }
  void reset() override { layer = register_module("layer", nn::Linear(4, 3)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = layer(x);
    halves += y.scalar_type() == at::kHalf;
    return y;
  }
  static inline std::atomic<int> halves = 0;
  nn::Linear layer{nullptr};
};

TEST(Autocast, HoldsInReplicaThreadsWithItsDtype) {
  auto net = std::make_shared<Noting>();
  DataParallel model(net, {.num_replicas = 3});
  torch::Tensor output;
  {
    auto guard = autocast(at::kCPU, {.dtype = at::kHalf});
    output = model(torch::randn({6, 4}));
  }
  EXPECT_EQ(Noting::halves.load(), 3);
  EXPECT_EQ(output.scalar_type(), at::kHalf);
  output.to(at::kFloat).sum().backward();
  EXPECT_EQ(net->layer->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(net->layer->bias.grad()[0].item<float>(), 6);
  Noting::halves = 0;
  (void)model(torch::randn({6, 4}));
  EXPECT_EQ(Noting::halves.load(), 0) << "the threads are as they were";
}

/// a·b, noting the dtype in which forward and backward multiply.
struct Product : torch::autograd::Function<Product> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor a, torch::Tensor b,
                               std::optional<at::ScalarType> cast_inputs) {
    auto guard =
        cast_inputs ? custom_fwd(context, at::kCPU, *cast_inputs, a, b) : custom_fwd(context, at::kCPU);
    context->save_for_backward({a, b});
    input_dtype = a.scalar_type();
    forward_dtype = product_dtype();
    return a.mm(b);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto guard = custom_bwd(context, at::kCPU);
    const auto saved = context->get_saved_variables();
    backward_dtype = product_dtype();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0]), {}};
  }
  static inline at::ScalarType input_dtype, forward_dtype, backward_dtype;
};

TEST(Autocast, CustomFunctionsRunBackwardAsForward) {
  const auto a = torch::randn({3, 4}, torch::requires_grad()),
             b = torch::randn({4, 2}, torch::requires_grad());
  const auto run = [&](bool enabled, at::ScalarType dtype, std::optional<at::ScalarType> cast_inputs) {
    torch::Tensor output;
    {
      auto guard = autocast(at::kCPU, {.dtype = dtype, .enabled = enabled});
      output = Product::apply(a, b, cast_inputs);
    }
    a.mutable_grad().reset();
    auto guard = autocast(at::kCPU, {.enabled = !enabled});  // backward has a state of its own
    output.sum().backward();
    EXPECT_EQ(a.grad().scalar_type(), at::kFloat);
    return output.scalar_type();
  };
  EXPECT_EQ(run(true, at::kHalf, {}), at::kHalf);
  EXPECT_EQ(Product::input_dtype, at::kFloat);
  EXPECT_EQ(Product::backward_dtype, at::kHalf);
  EXPECT_EQ(run(false, at::kHalf, {}), at::kFloat);
  EXPECT_EQ(Product::backward_dtype, at::kFloat);
  EXPECT_EQ(run(true, at::kHalf, at::kBFloat16), at::kBFloat16) << "cast, and no autocast";
  EXPECT_EQ(Product::input_dtype, at::kBFloat16);
  EXPECT_EQ(Product::forward_dtype, at::kFloat);
  EXPECT_EQ(Product::backward_dtype, at::kFloat);
  EXPECT_EQ(run(false, at::kHalf, at::kBFloat16), at::kFloat) << "outside of a scope nothing is cast";
}

TEST(Autocast, CustomInputsAreCastIfTheyCanBe) {
  torch::autograd::AutogradContext context;
  auto number = torch::ones({2}), large = torch::ones({2}, at::kDouble), count = torch::ones({2}, at::kLong);
  std::vector<std::pair<torch::Tensor, int>> nest{{torch::ones({2}), 3}};
  auto around = autocast(at::kCPU);
  auto guard = custom_fwd(&context, at::kCPU, at::kHalf, number, large, count, nest);
  EXPECT_EQ(number.scalar_type(), at::kHalf);
  EXPECT_EQ(large.scalar_type(), at::kDouble);
  EXPECT_EQ(count.scalar_type(), at::kLong);
  EXPECT_EQ(nest[0].first.scalar_type(), at::kHalf);
  torch::autograd::AutogradContext other;
  EXPECT_THAT(message_of<c10::Error>([&] { auto none = custom_bwd(&other, at::kCPU); }),
              HasSubstr("forward() did not call custom_fwd()"));
}

TEST(Autocast, GradientsUnderDdpAreThoseOfOneProcess) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(3);
    auto net = std::make_shared<nn::LinearImpl>(8, 4);
    const auto alone = std::dynamic_pointer_cast<nn::LinearImpl>(net->clone());
    DistributedDataParallel<nn::LinearImpl> model(net);
    const auto x = torch::randn({2, 6, 8});
    const auto backward = [](auto& module, const torch::Tensor& input) {
      torch::Tensor loss;
      {
        auto guard = autocast(at::kCPU);
        const auto output = module.forward(input);
        EXPECT_EQ(output.scalar_type(), at::kBFloat16);
        loss = output.square().mean();
      }
      loss.backward();
    };
    backward(model, x[rank]);
    for (int i = 0; i < 2; ++i) backward(*alone, x[i]);
    for (size_t i = 0; i < 2; ++i) {
      const auto gradient = net->parameters()[i].grad();
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::allclose(gradient, alone->parameters()[i].grad() / 2, 1e-6, 1e-8));
    }
  });
}

}  // namespace
}  // namespace lockstep::autocast_test

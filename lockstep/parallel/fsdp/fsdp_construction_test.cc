// Modules that come without values: on the meta device, on some ranks or all.
#include <cstdio>
#include <cstdlib>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <sys/resource.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/meta_device_guard.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_construction_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

/// Of LibTorch's classes with parameters, most; one weight is tied.
struct ManyImpl : nn::Module {
  ManyImpl() {
    register_module("linear", nn::Linear(3, 5));
    register_module("bilinear", nn::Bilinear(3, 2, 4));
    register_module("convolution", nn::Conv2d(nn::Conv2dOptions(3, 4, 2)));
    register_module("transposed", nn::ConvTranspose1d(nn::ConvTranspose1dOptions(3, 4, 2)));
    const nn::Embedding embedding(nn::EmbeddingOptions(7, 4).padding_idx(1));
    register_module("embedding", embedding);
    register_module("lstm", nn::LSTM(nn::LSTMOptions(4, 3).num_layers(2)));
    register_module("cell", nn::GRUCell(4, 3));
    register_module("layer_norm", nn::LayerNorm(nn::LayerNormOptions({4})));
    register_module("group_norm", nn::GroupNorm(2, 4));
    register_module("batch_norm", nn::BatchNorm2d(4));
    register_module("instance_norm", nn::InstanceNorm1d(nn::InstanceNorm1dOptions(4).affine(true)));
    register_module("prelu", nn::PReLU(nn::PReLUOptions().num_parameters(3).init(0.3)));
    register_module("attention", nn::MultiheadAttention(4, 2));
    register_module("attention_of_others",
                    nn::MultiheadAttention(nn::MultiheadAttentionOptions(4, 2).kdim(3).vdim(5)));
    register_parameter("tied", embedding->weight);
    register_module("last", nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
TORCH_MODULE(Many);

template <class Make>
auto on_meta(const Make& make) {
  const MetaDeviceGuard guard;
  return make();
}

/// A seed of its own for each rank: what it makes of it must not be seen anywhere but on rank 0.
Many make_many(int rank) {
  torch::manual_seed(rank == 0 ? 21 : 100 + rank);
  return Many();
}

StateDict state_of(const nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) state.emplace(item.key(), item.value().detach().clone());
  for (const auto& item : module.named_buffers()) state.emplace(item.key(), item.value().detach().clone());
  return state;
}

TEST(FsdpConstruction, ValuesAreThoseOfAModelBuiltWholeOnRank0) {
  for (const auto& precision : {fsdp::MixedPrecision(), fsdp::MixedPrecision{.param_dtype = at::kBFloat16}}) {
    for (const bool rank_0_has_values : {false, true}) {
      run_ranks(3, [&](int rank) {
        auto world = init_process_group();
        const auto expected = state_of(*make_many(0));
        const auto make = [&] { return make_many(rank); };
        const Many net = rank_0_has_values && rank == 0 ? make() : on_meta(make);
        FullyShardedDataParallel model(net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20),
                                             .mixed_precision = precision,
                                             .sync_module_states = rank_0_has_values});
        expect_equal(model.full_state_dict(), expected);
        for (const auto& parameter : net->parameters())
          EXPECT_TRUE(parameter.is_cpu() && parameter.requires_grad());
      });
    }
  }
}

TEST(FsdpConstruction, TrainsAsAModelBuiltWhole) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto make = [] {
      torch::manual_seed(5);
      nn::Sequential net;  // its constructor's arguments are made in whatever order
      net->push_back(nn::Linear(4, 6));
      net->push_back(nn::BatchNorm1d(6));
      net->push_back(nn::Tanh());
      net->push_back(nn::Linear(6, 3));
      return net;
    };
    const auto train = [&](const nn::Sequential& net) {
      FullyShardedDataParallel model(net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(10)});
      const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
      for (int step = 0; step < 5; ++step) {
        optimizer->zero_grad();
        model.forward(testing::random({8, 4}, static_cast<uint64_t>(10 * step + rank), at::kFloat))
            .square()
            .mean()
            .backward();
        optimizer->step();
      }
      return model.full_state_dict();
    };
    const auto whole = train(make());
    const auto net = on_meta(make);
    torch::manual_seed(5);
    expect_equal(train(net), whole);
  });
}

/// Values that no class of LibTorch's has, and a weight of a child.
struct ScaledImpl : nn::Module {
  ScaledImpl() { reset(); }
  void reset() {
    const torch::NoGradGuard no_grad;
    scale.fill_(2.5);
    offsets.copy_(torch::arange(5));
  }
  nn::Linear layer = register_module("layer", nn::Linear(3, 2));
  torch::Tensor tied = register_parameter("tied", layer->weight);
  torch::Tensor scale = register_parameter("scale", torch::empty({3}));
  torch::Tensor offsets = register_buffer("offsets", torch::empty({5}));
};
TORCH_MODULE(Scaled);

TEST(FsdpConstruction, ClassesOfOnesOwnNeedAParamInitFn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(8);
    const auto expected = state_of(*Scaled());
    const Scaled net = on_meta([] { return Scaled(); });
    EXPECT_THAT(message_of<c10::Error>([&] { FullyShardedDataParallel model(net); }),
                HasSubstr(rank == 0 ? "module '' of class" : "1 rank of the group failed to be wrapped"));
    EXPECT_TRUE(net->scale.is_meta()) << "nothing has changed";
    int calls = 0;
    torch::manual_seed(rank == 0 ? 8 : 9);
    FullyShardedDataParallel model(net, {.param_init_fn = [&](nn::Module& module) {
                                     ++calls;
                                     auto* scaled = module.as<ScaledImpl>();
                                     if (scaled == nullptr) return fsdp::reset_parameters(module);
                                     scaled->reset();
                                     const torch::NoGradGuard no_grad;
                                     scaled->tied.fill_(9);  // has values already: the child's
                                   }});
    EXPECT_EQ(calls, rank == 0 ? 2 : 0);
    expect_equal(model.full_state_dict(), expected);
    EXPECT_TRUE(at::equal(net->offsets, torch::arange(5).to(at::kFloat)))
        << "each rank has buffers of its own";
  });
}

TEST(FsdpConstruction, WhatFailsOnRank0IsToldOnAll) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const nn::Linear net = on_meta([] { return nn::Linear(3, 2); });
    EXPECT_THAT(
        message_of<c10::Error>([&] {
          FullyShardedDataParallel model(
              net, {.param_init_fn = [](nn::Module&) { TORCH_CHECK(false, "no values today"); }});
        }),
        HasSubstr(rank == 0 ? "no values today" : "1 rank of the group failed to give a module values"));
  });
}

TEST(FsdpConstruction, WhatHasNoValuesIsRefused) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto make = [] { return nn::Linear(3, 2); };
    const nn::Linear on_rank_1 = rank == 1 ? on_meta(make) : make();
    EXPECT_THAT(message_of<c10::Error>([&] { FullyShardedDataParallel model(on_rank_1); }),
                HasSubstr(rank == 1 ? "other tensors on the meta device" : "1 rank of the group failed"));
    const nn::Linear ignored = on_meta(make);
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  FullyShardedDataParallel model(ignored, {.ignored_parameters = {ignored->bias}});
                }),
                HasSubstr("'bias' is on the meta device and is ignored"));
    struct Derived : nn::LinearImpl {
      Derived() : nn::LinearImpl(3, 2) { register_parameter("more", torch::ones({2})); }
    };
    EXPECT_FALSE(fsdp::can_reset_parameters(*std::make_shared<Derived>())) << "it has more than a Linear";
    Derived derived;
    EXPECT_THAT(message_of<c10::ValueError>([&] { fsdp::reset_parameters(derived); }),
                HasSubstr("param_init_fn"));
  });
}

int64_t kilobytes_of(const char* file, const std::string& field) {
  std::FILE* status = std::fopen(file, "r");
  char line[256];
  int64_t found = 0;
  while (std::fgets(line, sizeof line, status) != nullptr) {
    if (std::string(line).starts_with(field + ":"))
      found = std::strtoll(line + field.size() + 1, nullptr, 10);
  }
  std::fclose(status);
  return found;
}

/// Private memory that can be written to, which neither shared memory nor files count for: at most `more` bytes beyond now.
class PrivateMemoryBound {
 public:
  explicit PrivateMemoryBound(rlim_t more) {
    ::getrlimit(RLIMIT_DATA, &before_);
    rlimit bound = before_;
    bound.rlim_cur = static_cast<rlim_t>(kilobytes_of("/proc/self/status", "VmData")) * 1024 + more;
    EXPECT_EQ(::setrlimit(RLIMIT_DATA, &bound), 0);
  }
  PrivateMemoryBound(const PrivateMemoryBound&) = delete;
  PrivateMemoryBound& operator=(const PrivateMemoryBound&) = delete;
  ~PrivateMemoryBound() { ::setrlimit(RLIMIT_DATA, &before_); }

 private:
  rlimit before_{};
};

TEST(FsdpConstruction, NoRankEverHasAWholeModelOfItsOwn) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need memory of their own";
#endif
  constexpr int64_t kWidth = 1024, kLayers = 24;  // of 4 MiB each, 96 MiB
  constexpr int64_t kModelKilobytes = kLayers * kWidth * kWidth * 4 / 1024;
  run_ranks(3, [](int) {
    auto world = init_process_group();
    const auto make = [] {
      nn::Sequential net;
      for (int layer = 0; layer < kLayers; ++layer) {
        net->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
      }
      return net;
    };
    all_reduce(torch::ones({1}));  // what the group needs in any case
    int64_t shared = 0;
    {
      const PrivateMemoryBound bound(static_cast<rlim_t>(kModelKilobytes) * 1024 / 2);
      EXPECT_THROW(make(), std::exception) << "the bound must keep a whole model out";
      const auto net = on_meta(make);
      FullyShardedDataParallel model(
          net, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1), .gradient_buffers = 1});
      barrier();
      shared =
          kilobytes_of("/proc/self/smaps_rollup", "Pss_Shmem");  // a page of all ranks counts a third in each
      barrier();
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(model.forward(torch::ones({1, kWidth})).isfinite().all().item<bool>());
    }
    auto sum = torch::tensor({shared});
    all_reduce(sum);
    EXPECT_GT(sum.item<int64_t>(), kModelKilobytes * 9 / 10) << "all of it is there";
    EXPECT_LT(sum.item<int64_t>(), kModelKilobytes * 5 / 4) << "once, and what gradients need";
  });
}

}  // namespace
}  // namespace lockstep::fsdp_construction_test

#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/module_inspection.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::convert_sync_batchnorm_test {
namespace {

namespace nn = torch::nn;
using testing::difference;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::random;
using testing::run_ranks;

/// Calls of a training-mode layer with a batch for each rank: whether they see the other ranks' batches.
bool synchronises(const std::function<torch::Tensor(const torch::Tensor&)>& layer, int rank, int64_t channels,
                  at::ScalarType type = at::kDouble) {
  const auto whole = random({4 * get_world_size(), channels, 2, 2}, 77).to(type);
  const auto expected = torch::batch_norm(whole, {}, {}, {}, {}, true, 0, 1e-5, false);
  const auto output = layer(whole.narrow(0, 4 * rank, 4));
  return difference(output, expected.narrow(0, 4 * rank, 4)) < (type == at::kDouble ? 1e-10 : 1e-5);
}

/// What a plain batch normalisation answers in all the ways in which it can be called.
std::vector<torch::Tensor> plain_answers() {
  std::vector<torch::Tensor> answers;
  nn::BatchNorm2d norm(3);
  norm->to(at::kDouble);
  {
    torch::NoGradGuard no_grad;
    norm->weight.copy_(random({3}, 1));
  }
  const auto input = random({4, 3, 2, 2}, 2).requires_grad_();
  const auto output = norm(input);
  output.pow(3).sum().backward();
  answers.insert(answers.end(), {output, input.grad(), norm->weight.grad(), norm->running_var.clone()});
  const auto slope = torch::autograd::grad({norm(input).pow(3).sum()}, {input}, {}, true, true)[0];
  answers.push_back(torch::autograd::grad({slope.square().sum()}, {input})[0]);
  {
    torch::NoGradGuard no_grad;
    answers.push_back(norm(input));
  }
  {
    c10::InferenceMode inference;
    answers.push_back(norm(input).clone());
  }
  norm->eval();
  answers.push_back(norm(input));
  {
    c10::InferenceMode inference;
    answers.push_back(norm(input).clone());
  }
  // In TorchScript: interpreted, then optimised with a gradient.
  const auto unit = torch::jit::compile(
      "def f(x, w, m, v):\n    return torch.batch_norm(x, w, None, m, v, True, 0.1, 1e-5, False) * 2\n");
  for (int run = 0; run < 4; ++run) {
    const auto x = random({4, 3, 2, 2}, 3).requires_grad_();
    const auto weight = random({3}, 4).requires_grad_();
    const auto result =
        unit->run_method("f", x, weight, torch::zeros({3}, at::kDouble), torch::ones({3}, at::kDouble));
    result.toTensor().pow(2).sum().backward();
    answers.insert(answers.end(), {result.toTensor(), x.grad(), weight.grad()});
  }
  answers.push_back(torch::batch_norm(random({4, 3}, 8).to(at::kFloat), {}, {}, {}, {}, true, 0, 1e-5, true)
                        .to(at::kDouble));
  return answers;
}

TEST(ConvertSyncBatchnorm, OtherBatchNormsStayAsTheyAreAndTorchSaysNothing) {
  const auto before = plain_answers();
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  nn::Sequential net(nn::Conv2d(3, 4, 1), nn::BatchNorm2d(4));
  EXPECT_EQ(convert_sync_batchnorm(net).get(), net.get());
  const auto after = plain_answers();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), IsEmpty());
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), IsEmpty());
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].equal(after[i])) << i;
  // The converted one too, without a group to synchronise over.
  const auto input = torch::randn({3, 4, 2, 2});
  EXPECT_TRUE(net->ptr(1)->as<nn::BatchNorm2dImpl>()->forward(input).equal(nn::BatchNorm2d(4)(input)));
}

TEST(ConvertSyncBatchnorm, EveryKindOfModuleInEveryMode) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool affine : {true, false}) {
      for (const bool tracks : {true, false}) {
        SCOPED_TRACE(c10::str("affine ", affine, ", tracks ", tracks));
        nn::BatchNorm2d norm(nn::BatchNorm2dOptions(3).affine(affine).track_running_stats(tracks));
        nn::BatchNorm2d other(nn::BatchNorm2dOptions(3).affine(affine).track_running_stats(tracks));
        const auto call = [&](const torch::Tensor& x) { return norm(x); };
        convert_sync_batchnorm(norm);
        EXPECT_EQ(norm->parameters().size(), affine ? 2u : 0u);
        EXPECT_TRUE(synchronises(call, rank, 3, at::kFloat));
        EXPECT_FALSE(synchronises([&](const auto& x) { return other(x); }, rank, 3, at::kFloat));
        norm->to(at::kDouble);
        EXPECT_TRUE(synchronises(call, rank, 3)) << "after to()";
        {
          torch::NoGradGuard no_grad;
          EXPECT_TRUE(synchronises(call, rank, 3)) << "without gradients";
        }
        {
          c10::InferenceMode inference;
          EXPECT_TRUE(synchronises(call, rank, 3)) << "below autograd";
        }
        std::stringstream file;
        torch::save(norm, file);
        torch::load(norm, file);
        EXPECT_TRUE(synchronises(call, rank, 3)) << "after load()";
        norm->eval();
        other->eval();
        other->to(at::kDouble);
        if (rank == 1) {
          // Alone, and as a plain one.
          const auto input = random({3, 3, 2, 2}, 4);
          if (tracks) {
            other->running_mean.copy_(norm->running_mean);
            other->running_var.copy_(norm->running_var);
          }
          EXPECT_TRUE(norm(input).equal(other(input)));
          c10::InferenceMode inference;
          EXPECT_TRUE(norm(input).equal(other(input)));
        }
        norm->train();
        EXPECT_TRUE(synchronises(call, rank, 3)) << "after train()";
        auto copy = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(norm->clone());
        const auto call_copy = [&](const torch::Tensor& x) { return copy->forward(x); };
        EXPECT_FALSE(synchronises(call_copy, rank, 3)) << "a clone is to be converted anew";
        convert_sync_batchnorm(copy);
        EXPECT_TRUE(synchronises(call_copy, rank, 3));
        EXPECT_TRUE(synchronises(call, rank, 3));
      }
    }
  });
}

TEST(ConvertSyncBatchnorm, OneAndThreeDimensionsSubmodulesAndGroups) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    const auto [pair, pairs] = new_subgroups(2);
    nn::Sequential inner(nn::BatchNorm1d(nn::BatchNorm1dOptions(3).affine(false)), nn::Flatten());
    nn::ModuleList net(inner, nn::Linear(3, 3), SyncBatchNorm(nn::BatchNormOptions(3).affine(false)));
    net->to(at::kDouble);
    convert_sync_batchnorm(net, pair);
    const auto whole = random({8, 3}, 50 + rank / 2);
    const auto expected = torch::batch_norm(whole, {}, {}, {}, {}, true, 0, 1e-5, false);
    EXPECT_LE(
        difference(inner->forward(whole.narrow(0, rank % 2 * 4, 4)), expected.narrow(0, rank % 2 * 4, 4)),
        1e-10);
    EXPECT_EQ(net->ptr(2)->as<SyncBatchNormImpl>()->process_group, pair);
    EXPECT_EQ(sync_batch_norm_groups(*net), (std::vector<ProcessGroup>{pair, pair}));
    EXPECT_THAT(sync_batch_norm_groups(*nn::BatchNorm1d(3)), IsEmpty());
    nn::BatchNorm3d volume(nn::BatchNorm3dOptions(3).affine(false));
    volume->to(at::kDouble);
    convert_sync_batchnorm_(*volume);
    EXPECT_TRUE(synchronises([&](const auto& x) { return volume(x.unsqueeze(2)).squeeze(2); }, rank, 3));
    EXPECT_EQ(sync_batch_norm_groups(*volume), std::vector<ProcessGroup>(1));
    convert_sync_batchnorm(volume, pair);  // the last conversion counts
    EXPECT_FALSE(synchronises([&](const auto& x) { return volume(x.unsqueeze(2)).squeeze(2); }, rank, 3));
    const auto others = new_group({0, 1, 2});
    if (rank == 3) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { convert_sync_batchnorm(volume, others); }),
                  HasSubstr("not in its process group"));
    }
  });
}

TEST(ConvertSyncBatchnorm, ADestroyedModulesAddressMayBelongToAnother) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto input = random({4, 3, 2, 2}, rank).to(at::kFloat);
    const auto plain = torch::batch_norm(input, {}, {}, {}, {}, true, 0, 1e-5, false);
    for (int round = 0; round < 200; ++round) {
      const auto options =
          nn::BatchNorm2dOptions(3).affine(round % 2 == 0).track_running_stats(round % 4 < 2);
      torch::Tensor weight;
      {
        nn::BatchNorm2d gone(options);
        convert_sync_batchnorm(gone);
        weight = gone->weight;
      }
      nn::BatchNorm2d norm(options);
      EXPECT_EQ(difference(norm(input), plain), 0);
      if (options.affine()) {
        EXPECT_EQ(difference(torch::batch_norm(input, weight, {}, {}, {}, true, 0, 1e-5, false), plain), 0)
            << "a tensor that outlives its module";
      }
    }
  });
}

TEST(ConvertSyncBatchnorm, TorchsOwnCheckRefusesASingleValue) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    nn::BatchNorm1d norm(3);
    convert_sync_batchnorm(norm);
    EXPECT_THAT(message_of<c10::Error>([&] {
                  norm(torch::randn({1, 3}));
                }),
                HasSubstr("Expected more than 1 value per channel when training"));
  });
}

}  // namespace
}  // namespace lockstep::convert_sync_batchnorm_test

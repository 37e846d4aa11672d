#include <gmock/gmock.h>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::grad_norm_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<double> kNorms{1, 2, 3, 0.5, kInfinity, -kInfinity, -1, 0};

/// Parameters with gradients; the third has none.
std::vector<torch::Tensor> parameters(at::ScalarType type = at::kFloat) {
  std::vector<torch::Tensor> answer;
  const std::vector<std::vector<int64_t>> sizes{{30, 20}, {7}, {3}, {4, 5, 6}, {1000}};
  for (size_t i = 0; i < sizes.size(); ++i) {
    answer.push_back(torch::zeros(sizes[i], type).requires_grad_());
    if (i != 2) answer.back().mutable_grad() = random(sizes[i], i, type);
  }
  return answer;
}

std::vector<torch::Tensor> gradients(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> answer;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) answer.push_back(parameter.grad());
  }
  return answer;
}

torch::Tensor in_a_row(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}).to(at::kDouble));
  return torch::cat(flat);
}

TEST(GradNorm, ClipsAsTorchDoes) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    for (const double norm : {1.0, 2.0, 3.0, kInfinity}) {
      for (const double max_norm : {0.5, 1e6}) {
        for (const std::optional<bool> foreach :
             {std::optional<bool>(), std::optional(true), std::optional(false)}) {
          auto mine = parameters(type), torchs = parameters(type);
          const auto total = clip_grad_norm_(mine, max_norm, norm, false, foreach);
          const double expected = nn::utils::clip_grad_norm_(torchs, max_norm, norm);
          EXPECT_EQ(total.scalar_type(), type);
          EXPECT_NEAR(total.item<double>(), expected, 1e-6 * expected) << norm;
          for (size_t i = 0; i < mine.size(); ++i) {
            ASSERT_EQ(mine[i].grad().defined(), i != 2);
            if (i == 2) continue;
            EXPECT_TRUE(at::allclose(mine[i].grad(), torchs[i].grad(), 1e-6, 1e-9)) << norm;
          }
        }
      }
    }
  }
}

TEST(GradNorm, IsTheNormOfAllElements) {
  const auto tensors = gradients(parameters());
  for (const double norm : kNorms) {
    const double expected = norm == 0 ? 4 : torch::linalg_vector_norm(in_a_row(tensors), norm).item<double>();
    EXPECT_NEAR(get_total_norm(tensors, norm).item<double>(), expected, 1e-5 * expected) << norm;
  }
  EXPECT_EQ(get_total_norm({torch::zeros({3}), torch::ones({2})}, 0).item<double>(), 1) << "not all zero";
  EXPECT_EQ(get_total_norm({}).item<double>(), 0);
  EXPECT_EQ(clip_grad_norm_({torch::zeros({3}).requires_grad_()}, 1).item<double>(), 0);
  // Different types at once, and float32 for half precision: 300 ones have the norm 17.32.
  EXPECT_NEAR(
      get_total_norm({torch::ones({200}, at::kBFloat16), torch::ones({100}, at::kDouble)}).item<double>(),
      std::sqrt(300), 1e-6);
  EXPECT_NEAR(get_total_norm({torch::full({5}, 6e4).to(at::kHalf)}).item<double>(), 6e4 * std::sqrt(5), 100)
      << "no overflow";
}

TEST(GradNorm, ShardedOverRanksIsTheNormOfAll) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, [ranks](int rank) {
      auto world = init_process_group();
      // The parameters are assigned to ranks; of four ranks the last has none (and of its own no gradient).
      const auto all = parameters();
      std::vector<torch::Tensor> mine;
      for (size_t i = 0; i < all.size(); ++i) {
        if (static_cast<int>(i) % std::min(ranks, 3) == rank) mine.push_back(all[i]);
      }
      mine.push_back(torch::zeros({0, 4}).requires_grad_());  // a piece without rows
      mine.back().mutable_grad() = torch::zeros({0, 4});
      for (const double norm : kNorms) {
        const double expected = get_total_norm(gradients(all), norm).item<double>();
        const auto total = get_total_norm(gradients(mine), norm, false, {}, ProcessGroup());
        EXPECT_NEAR(total.item<double>(), expected, 1e-6 * expected) << norm;
        std::vector<torch::Tensor> totals;
        for (int i = 0; i < ranks; ++i) totals.push_back(torch::empty({}));
        all_gather(totals, total);
        for (const auto& other : totals) EXPECT_TRUE(other.equal(total)) << "all ranks have the same bits";
      }
      const auto expected = parameters();
      nn::utils::clip_grad_norm_(expected, 1.0, 3.0);
      clip_grad_norm_(mine, 1.0, 3.0, true, {}, default_group());
      for (size_t i = 0; i < all.size(); ++i) {
        if (static_cast<int>(i) % std::min(ranks, 3) != rank || i == 2) continue;
        EXPECT_TRUE(at::allclose(all[i].grad(), expected[i].grad(), 1e-6, 1e-9));
      }
      // One bad gradient is an error everywhere.
      if (rank == 0) mine[0].mutable_grad().fill_(kInfinity);
      EXPECT_THAT(message_of<c10::Error>([&] { clip_grad_norm_(mine, 1, 2, true, {}, ProcessGroup()); }),
                  HasSubstr("non-finite"));
      if (ranks == 4) {
        const auto others = new_group({0, 1, 2});
        if (rank == 3) {
          EXPECT_THAT(message_of<c10::ValueError>([&] { get_total_norm({}, 2, false, {}, others); }),
                      HasSubstr("not a member"));
        }
      }
    });
  }
}

TEST(GradNorm, ReplicatedGradientsNeedNoCommunication) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    nn::Linear model(4, 3);
    model(random({5, 4}, 1, at::kFloat)).square().sum().backward();
    const auto expected = torch::linalg_vector_norm(in_a_row(gradients(model->parameters()))).item<double>();
    const auto count = [] { return default_group()->getBackend(at::kCPU)->getSequenceNumberForGroup(); };
    const auto before = count();
    const auto total = clip_grad_norm_(model->parameters(), 0.1);
    EXPECT_EQ(count(), before);
    EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected);
    EXPECT_NEAR(get_total_norm(gradients(model->parameters())).item<double>(), 0.1, 1e-5);
  });
}

TEST(GradNorm, NonFiniteNormsAreAnErrorOnlyWhenAskedFor) {
  auto list = parameters();
  list[1].mutable_grad()[3] = std::nan("");
  EXPECT_THAT(message_of<c10::Error>([&] { clip_grad_norm_(list, 1.0, 2.0, /*error_if_nonfinite=*/true); }),
              HasSubstr("The total norm of order 2 for gradients from `parameters` is non-finite"));
  EXPECT_TRUE(at::allclose(list[0].grad(), random({30, 20}, 0, at::kFloat))) << "nothing was scaled";
  EXPECT_TRUE(std::isnan(clip_grad_norm_(list, 1.0).item<double>()));
  EXPECT_TRUE(list[0].grad().isnan().all().item<bool>()) << "as torch";
}

TEST(GradNorm, SparseGradientsCountAsTheDenseOnes) {
  nn::Embedding sparse(nn::EmbeddingOptions(10, 3).sparse(true));
  nn::Embedding dense(nn::EmbeddingOptions(10, 3));
  const auto words = torch::tensor({1, 4, 4, 4, 9});  // several times the same index
  sparse(words).sum().backward();
  dense(words).sum().backward();
  for (const double norm : {1.0, 2.0, kInfinity}) {
    EXPECT_NEAR(clip_grad_norm_(sparse->parameters(), 1.5, norm).item<double>(),
                nn::utils::clip_grad_norm_(dense->parameters(), 1.5, norm), 1e-5);
    EXPECT_TRUE(at::allclose(sparse->weight.grad().to_dense(), dense->weight.grad())) << norm;
  }
}

TEST(GradNorm, ClipsByValueAsTorchDoes) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const std::optional<bool> foreach :
         {std::optional<bool>(), std::optional(true), std::optional(false)}) {
      auto mine = parameters(type), torchs = parameters(type);
      for (auto* list : {&mine, &torchs}) (*list)[1].mutable_grad()[3] = std::nan("");
      clip_grad_value_(mine, 0.5, foreach);
      nn::utils::clip_grad_value_(torchs, 0.5);
      for (size_t i = 0; i < mine.size(); ++i) {
        ASSERT_EQ(mine[i].grad().defined(), i != 2);
        if (i == 2) continue;
        EXPECT_TRUE(at::allclose(mine[i].grad(), torchs[i].grad(), 0, 0, /*equal_nan=*/true)) << type;
        EXPECT_EQ(mine[i].grad().isnan().any().item<bool>(), i == 1) << "NaN stays";
      }
    }
  }
  clip_grad_value_({}, 1);
}

TEST(GradNorm, SparseGradientsCannotBeClippedByValue) {
  nn::Embedding sparse(nn::EmbeddingOptions(10, 3).sparse(true));
  (sparse(torch::tensor({1, 4})).sum() * 5).backward();
  const auto dense = torch::zeros({2}).requires_grad_();
  dense.mutable_grad() = torch::full({2}, 5.0);
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                clip_grad_value_({dense, sparse->weight}, 1);
              }),
              HasSubstr("a gradient of the sizes [10, 3] is sparse"));
  EXPECT_TRUE(dense.grad().equal(torch::full({2}, 5.0))) << "nothing was clipped";
}

TEST(GradNorm, AParameterUnderTwoNamesCountsOnce) {
  auto list = parameters();
  const double expected = clip_grad_norm_(list, 1e9).item<double>();
  list.push_back(list[0]);
  EXPECT_EQ(clip_grad_norm_(list, expected / 2).item<double>(), expected);
  EXPECT_TRUE(at::allclose(list[0].grad(), random({30, 20}, 0, at::kFloat) / 2, 1e-4)) << "scaled once";
}

}  // namespace
}  // namespace lockstep::grad_norm_test

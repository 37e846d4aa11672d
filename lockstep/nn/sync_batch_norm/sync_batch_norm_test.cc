#include <cmath>
#include <gmock/gmock.h>
#include <numeric>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::sync_batch_norm_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;
using testing::same_everywhere;

/// The batch sizes of the ranks: first equal, then unequal, then with an empty one.
std::vector<std::vector<int64_t>> splits(int ranks) {
  std::vector<std::vector<int64_t>> all{{3, 3, 3, 3}, {2, 5, 1, 3}};
  if (ranks > 1) all.push_back({4, 0, 2, 1});
  for (auto& split : all) split.resize(ranks);
  return all;
}

/// This rank's rows of a tensor that all ranks hold.
torch::Tensor part(const torch::Tensor& whole, const std::vector<int64_t>& split, int rank) {
  return whole.narrow(0, std::accumulate(split.begin(), split.begin() + rank, int64_t{0}), split[rank]);
}

torch::Tensor sum_over_ranks(const torch::Tensor& tensor) {
  auto copy = tensor.detach().clone();
  all_reduce(copy);
  return copy;
}

::testing::AssertionResult close(const torch::Tensor& actual, const torch::Tensor& expected,
                                 double bound = 1e-10) {
  if (actual.sizes() != expected.sizes())
    return ::testing::AssertionFailure() << actual.sizes() << " instead of " << expected.sizes();
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const double difference = (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  const double scale = std::max(1.0, expected.abs().max().item<double>());
  if (difference <= bound * scale) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "differs by " << difference;
}

struct Layer {
  torch::Tensor weight, bias, running_mean, running_var;
};

Layer make_layer(int64_t channels, bool affine, bool running, at::ScalarType type = at::kDouble) {
  Layer layer;
  if (affine) {
    layer.weight = random({channels}, 1, type).requires_grad_();
    layer.bias = random({channels}, 2, type).requires_grad_();
  }
  if (running) {
    layer.running_mean = random({channels}, 3, type);
    layer.running_var = random({channels}, 4, type).abs();
  }
  return layer;
}

/// One training step of N ranks against one of plain batch normalisation with all ranks' rows.
void compare_with_whole(torch::Tensor whole, const std::vector<int64_t>& split, bool affine, bool running,
                        double bound = 1e-10, at::ScalarType parameters = at::kDouble) {
  const int rank = get_rank();
  const auto type = whole.scalar_type();
  const auto target = random(whole.sizes(), 99);
  const auto input = part(whole, split, rank).detach().clone(at::MemoryFormat::Preserve).requires_grad_();
  whole = whole.detach().to(at::kDouble).requires_grad_();

  Layer expected = make_layer(whole.size(1), affine, running, at::kDouble);
  const auto expected_output =
      torch::batch_norm(whole, expected.weight, expected.bias, expected.running_mean, expected.running_var,
                        /*training=*/true, 0.3, 1e-3, false);
  (expected_output * target).sum().backward();

  Layer layer = make_layer(whole.size(1), affine, running, parameters);
  const auto output =
      sync_batch_norm(input, layer.weight, layer.bias, layer.running_mean, layer.running_var, 1e-3, 0.3);
  EXPECT_EQ(output.scalar_type(), type);
  EXPECT_EQ(output.sizes(), input.sizes());
  EXPECT_TRUE(output.is_contiguous(input.suggest_memory_format()));
  (output * part(target, split, rank).to(type)).sum().backward();

  EXPECT_TRUE(close(output, part(expected_output, split, rank), bound));
  EXPECT_TRUE(close(input.grad(), part(whole.grad(), split, rank), bound));
  if (affine) {
    EXPECT_TRUE(close(sum_over_ranks(layer.weight.grad()), expected.weight.grad(), bound));
    EXPECT_TRUE(close(sum_over_ranks(layer.bias.grad()), expected.bias.grad(), bound));
  }
  if (running) {
    EXPECT_TRUE(close(layer.running_mean, expected.running_mean, bound));
    EXPECT_TRUE(close(layer.running_var, expected.running_var, bound));
    EXPECT_TRUE(same_everywhere(layer.running_mean));
    EXPECT_TRUE(same_everywhere(layer.running_var));
  }
}

TEST(SyncBatchNorm, RanksWithPartsEqualOneProcessWithTheWholeBatch) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, [&](int) {
      auto world = init_process_group();
      for (const auto& split : splits(ranks)) {
        SCOPED_TRACE(c10::str(split));
        const int64_t rows = std::accumulate(split.begin(), split.end(), int64_t{0});
        for (const std::vector<int64_t>& rest :
             std::vector<std::vector<int64_t>>{{5}, {1}, {3, 7}, {4, 6, 5}, {3, 2, 3, 4}}) {
          SCOPED_TRACE(c10::str(rest));
          std::vector<int64_t> sizes{rows};
          sizes.insert(sizes.end(), rest.begin(), rest.end());
          const auto whole = 3 * random(sizes, 7) + 10;
          compare_with_whole(whole, split, /*affine=*/true, /*running=*/true);
          compare_with_whole(whole, split, /*affine=*/false, /*running=*/false);
          if (whole.dim() == 4) {
            compare_with_whole(whole.contiguous(at::MemoryFormat::ChannelsLast), split, true, true);
          }
          if (whole.dim() == 5) {
            compare_with_whole(whole.contiguous(at::MemoryFormat::ChannelsLast3d), split, true, false);
          }
        }
      }
    });
  }
}

TEST(SyncBatchNorm, LargeInputsOfEachPrecision) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    at::set_num_threads(2);  // the loops are cut in pieces
    const auto whole = random({8, 19, 17, 31}, 5);
    compare_with_whole(whole, {5, 3}, true, true);
    compare_with_whole(whole.to(at::kFloat), {5, 3}, true, true, 1e-4, at::kFloat);
    // Half-precision inputs with float32 parameters, as under autocast, and with parameters like themselves.
    const auto rounded = whole.to(at::kBFloat16);
    compare_with_whole(rounded, {5, 3}, true, true, 2e-2, at::kFloat);
    compare_with_whole(rounded, {5, 3}, false, false, 2e-2);
    compare_with_whole(rounded.contiguous(at::MemoryFormat::ChannelsLast), {5, 3}, true, true, 2e-2,
                       at::kFloat);
    compare_with_whole(rounded, {5, 3}, true, true, 3e-2, at::kBFloat16);
    compare_with_whole(whole.to(at::kHalf), {5, 3}, true, true, 1e-2, at::kFloat);
  });
}

TEST(SyncBatchNorm, ALargeMeanDoesNotDrownTheVariance) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    // Values about 3000 and 3001: in float32 E[x²] − E[x]² would be off by more than the variance.
    const auto input = (random({64, 3}, 20 + rank) + 3000 + rank).to(at::kFloat);
    auto mean = torch::zeros({3});
    auto var = torch::zeros({3});
    sync_batch_norm(input, {}, {}, mean, var, 1e-5, /*momentum=*/1);
    std::vector<torch::Tensor> all{torch::empty_like(input), torch::empty_like(input)};
    all_gather(all, input);
    const auto [expected_var, expected_mean] = torch::var_mean(torch::cat(all).to(at::kDouble), 0);
    EXPECT_TRUE(close(var, expected_var, 1e-3));
    EXPECT_TRUE(close(mean, expected_mean, 1e-6));
  });
}

TEST(SyncBatchNorm, StridedInputsAndGradients) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto base = random({4, 6, 5, 3}, 30 + rank).requires_grad_();
    const auto other = base.detach().clone().requires_grad_();
    const auto strided = base.permute({0, 3, 2, 1}).slice(2, 0, 5, 2);
    const auto dense = other.permute({0, 3, 2, 1}).slice(2, 0, 5, 2).contiguous();
    const auto weight = random({3}, 1);
    // sum() sends a gradient of stride 0, the transposed product one in another order.
    const auto loss = [](const torch::Tensor& y) {
      return y.sum() + (y.transpose(2, 3).square() * 0.5).sum() + (y.select(0, 1) * 3).pow(3).sum();
    };
    loss(sync_batch_norm(strided, weight)).backward();
    loss(sync_batch_norm(dense, weight)).backward();
    EXPECT_TRUE(close(base.grad(), other.grad()));
    EXPECT_GT(base.grad().abs().max().item<double>(), 0.1);
  });
}

TEST(SyncBatchNorm, GradientsAreTheSlopesOfTheSumOfAllLosses) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const std::vector<int64_t> rows{3, 0, 2};
    const auto input = random({rows[rank], 4, 3}, 40 + rank).requires_grad_();
    const auto weight = random({4}, 1).requires_grad_();
    const auto target = random(input.sizes(), 50 + rank);
    const auto loss = [&](const torch::Tensor& x, const torch::Tensor& w) {
      return (sync_batch_norm(x, w, {}, {}, {}, 0.01).sigmoid() * target).sum();
    };
    loss(input, weight).backward();
    // A direction of all ranks' inputs and of the weight they share.
    const auto x_way = random(input.sizes(), 60 + rank);
    const auto w_way = random({4}, 61);
    torch::NoGradGuard no_grad;
    const double h = 1e-5;
    const auto difference =
        (loss(input + h * x_way, weight + h * w_way) - loss(input - h * x_way, weight - h * w_way)) / (2 * h);
    const auto slope = (input.grad() * x_way).sum() + (weight.grad() * w_way).sum();
    EXPECT_TRUE(close(sum_over_ranks(slope), sum_over_ranks(difference), 1e-8));
  });
}

TEST(SyncBatchNorm, CanBeDifferentiatedTwice) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const std::vector<int64_t> split{3, 0, 2};
    const auto values = random({5, 4, 3}, 7);
    const auto penalty = [](const torch::Tensor& x, const torch::Tensor& y) {
      const auto slope = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, /*retain_graph=*/true,
                                               /*create_graph=*/true)[0];
      return slope.square().sum();
    };
    const auto whole = values.clone().requires_grad_();
    const auto whole_weight = random({4}, 1).requires_grad_();
    penalty(whole, torch::batch_norm(whole, whole_weight, {}, {}, {}, true, 0, 1e-3, false)).backward();
    const auto input = part(values, split, rank).clone().requires_grad_();
    const auto weight = random({4}, 1).requires_grad_();
    penalty(input, sync_batch_norm(input, weight, {}, {}, {}, 1e-3)).backward();
    EXPECT_TRUE(close(input.grad(), part(whole.grad(), split, rank), 1e-9));
    EXPECT_TRUE(close(sum_over_ranks(weight.grad()), whole_weight.grad(), 1e-9));
  });
}

TEST(SyncBatchNorm, OneCollectiveAPass) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto count = [] { return default_group()->getBackend(at::kCPU)->getSequenceNumberForGroup(); };
    const auto input = random({4, 3}, rank).requires_grad_();
    const auto weight = random({3}, 1).requires_grad_();
    auto before = count();
    const auto output = sync_batch_norm(input, weight);
    EXPECT_EQ(count() - before, 1u);
    output.square().sum().backward();
    EXPECT_EQ(count() - before, 2u);
    before = count();
    sync_batch_norm(input.detach(), weight).square().sum().backward();  // a first layer: dx is not asked for
    EXPECT_EQ(count() - before, 1u);
  });
}

TEST(SyncBatchNorm, NoValuesAnywhereChangeNothing) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    SyncBatchNorm norm(3);
    const auto input = torch::empty({0, 3, 4}).requires_grad_();
    const auto output = norm(input);
    output.sum().backward();
    EXPECT_EQ(output.sizes(), input.sizes());
    EXPECT_TRUE(norm->running_mean.equal(torch::zeros({3})));
    EXPECT_TRUE(norm->running_var.equal(torch::ones({3})));
    EXPECT_TRUE(norm->weight.grad().equal(torch::zeros({3})));
    EXPECT_EQ(input.grad().sizes(), input.sizes());
  });
}

TEST(SyncBatchNorm, ErrorsNameWhatIsWrong) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    SyncBatchNorm norm(3);
    // One value per channel in all: refused on every rank, and nothing is changed.
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  norm(torch::randn({rank, 3}));
                }),
                HasSubstr("Expected more than 1 value per channel when training, got input size [" +
                          std::to_string(rank) + ", 3]"));
    EXPECT_TRUE(norm->running_mean.equal(torch::zeros({3})));
    EXPECT_NO_THROW(norm(torch::randn({1, 3}))) << "two values in all";
    EXPECT_THAT(message_of<c10::ValueError>([&] { norm(torch::randn({3})); }),
                HasSubstr("expected at least 2D input (got 1D input)"));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  norm(torch::randn({2, 0}));
                }),
                HasSubstr("number of input channels should be non-zero"));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  norm(torch::randn({2, 4}));
                }),
                HasSubstr("should contain 4 elements not 3"));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  sync_batch_norm(torch::ones({2, 3}, at::kLong));
                }),
                HasSubstr("floating-point type; it is Long"));
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  sync_batch_norm(torch::ones({2, 3}), {}, {}, torch::ones({3}));
                }),
                HasSubstr("both of running_mean and running_var"));
    const auto group = new_group({1});
    SyncBatchNorm other(3, group);
    if (rank == 0) {
      EXPECT_THAT(message_of<c10::ValueError>([&] {
                    other(torch::randn({2, 3}));
                  }),
                  HasSubstr("not in its process group"));
      other->eval();
      EXPECT_NO_THROW(other(torch::randn({2, 3}))) << "nothing to synchronise";
    } else {
      EXPECT_THAT(message_of<c10::Error>([&] {
                    other(torch::randn({1, 3}));
                  }),
                  HasSubstr("Expected more than 1 value per channel when training, got input size [1, 3]"));
    }
  });
}

TEST(SyncBatchNormModule, HasBatchNormsStateAndIsPlainAlone) {
  SyncBatchNorm norm(nn::BatchNormOptions(4).momentum(0.2).eps(1e-3));
  nn::BatchNorm2d plain(nn::BatchNorm2dOptions(4).momentum(0.2).eps(1e-3));
  EXPECT_EQ(norm->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_EQ(norm->named_buffers().keys(), plain->named_buffers().keys());
  const auto input = torch::randn({5, 4, 3, 3});
  EXPECT_TRUE(norm(input).equal(plain(input))) << "without a group";
  auto world = init_process_group({.rank = 0, .world_size = 1});
  EXPECT_TRUE(norm(input).equal(plain(input))) << "alone in a group";
  EXPECT_TRUE(norm->running_var.equal(plain->running_var));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
  // A checkpoint of one loads into the other.
  plain->running_mean.fill_(7);
  std::stringstream file;
  torch::save(plain, file);
  torch::load(norm, file);
  EXPECT_TRUE(norm->running_mean.equal(plain->running_mean));
  norm->eval();
  plain->eval();
  EXPECT_TRUE(norm(input).equal(plain(input)));
  std::ostringstream text;
  text << *norm;
  EXPECT_EQ(text.str(),
            "lockstep::SyncBatchNorm(4, eps=0.001, momentum=0.2, affine=true, track_running_stats=true)");
  SyncBatchNorm untracked(nn::BatchNormOptions(4).track_running_stats(false).affine(false));
  untracked->eval();
  EXPECT_TRUE(close(untracked(input), torch::batch_norm(input, {}, {}, {}, {}, true, 0, 1e-5, false), 1e-6));
}

TEST(SyncBatchNormModule, GroupsMomentumModesAndClones) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    const auto [pair, pairs] = new_subgroups(2);
    SyncBatchNorm norm(nn::BatchNormOptions(3).momentum(std::nullopt), pair);
    nn::BatchNorm1d whole(nn::BatchNorm1dOptions(3).momentum(std::nullopt));
    norm->to(at::kDouble);
    whole->to(at::kDouble);
    auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
    for (int step = 0; step < 3; ++step) {
      // Neighbours share statistics: the average over all batches so far, as momentum is None.
      const auto values = random({6, 3}, 100 * (rank / 2) + step);
      const auto mine = values.narrow(0, rank % 2 * 2, 2 + rank % 2 * 2);
      const auto expected = whole(values).narrow(0, rank % 2 * 2, mine.size(0));
      EXPECT_TRUE(close(norm(mine), expected));
      EXPECT_TRUE(close(copy->forward(mine), expected)) << "a clone keeps the group";
      torch::NoGradGuard no_grad;
      SyncBatchNorm quiet(3, pair);
      quiet->to(at::kDouble);
      EXPECT_TRUE(close(quiet(mine), expected)) << "without gradients too";
    }
    EXPECT_TRUE(close(norm->running_mean, whole->running_mean));
    EXPECT_TRUE(close(norm->running_var, whole->running_var));
    norm->eval();
    whole->eval();
    if (rank == 2) {  // no other rank: eval needs no peers
      const auto values = random({5, 3}, 1);
      EXPECT_TRUE(close(norm(values), whole(values)));
    }
  });
}

/// Two layers around a normalisation of either kind.
}  // namespace
}  // namespace lockstep::sync_batch_norm_test

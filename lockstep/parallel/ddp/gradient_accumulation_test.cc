#include <gmock/gmock.h>
#include <numeric>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/gradient_accumulation.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::gradient_accumulation_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using testing::message_of;
using testing::random;
using testing::run_ranks;

struct Net : nn::Module {
  Net() { register_module("first", first), register_module("last", last); }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  nn::Linear first{6, 5};
  nn::Linear last{5, 2};
};

std::shared_ptr<Net> make_net() {
  torch::manual_seed(1);
  auto net = std::make_shared<Net>();
  net->to(at::kDouble);
  return net;
}

void expect_same_state(const Net& net, const Net& expected) {
  for (const auto& item : net.named_parameters()) {
    const auto other = expected.named_parameters()[item.key()];
    EXPECT_TRUE(at::allclose(item.value(), other, 1e-12, 1e-12)) << item.key();
  }
}

int64_t collectives() {
  return static_cast<int64_t>(default_group()->getBackend(at::kCPU)->getSequenceNumberForGroup());
}

/// An epoch: this rank's rows of the data, in micro-batches of these sizes.
struct Epoch {
  torch::Tensor data;  // (ranks, rows, 6)
  torch::Tensor target;
  std::vector<int64_t> micro_batches;

  Epoch(int ranks, std::vector<int64_t> sizes, uint64_t seed) : micro_batches(std::move(sizes)) {
    const int64_t rows = std::accumulate(micro_batches.begin(), micro_batches.end(), int64_t{0});
    data = random({ranks, rows, 6}, seed);
    target = random({ranks, rows, 2}, seed + 1);
  }

  /// One step for each group of `steps` micro-batches, with all ranks' rows at once. `by_sample`: the loss is
  /// the mean over the group's rows; else the mean over the micro-batches of their means.
  void train_at_once(Net& net, int64_t steps, bool by_sample) const {
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    int64_t row = 0;
    for (size_t first = 0; first < micro_batches.size(); first += steps) {
      const size_t end = std::min(micro_batches.size(), first + steps);
      const auto begin = micro_batches.begin();
      const int64_t rows = std::accumulate(begin + first, begin + end, int64_t{0});
      optimizer.zero_grad();
      torch::Tensor loss;
      if (by_sample) {
        loss = torch::mse_loss(net.forward(data.narrow(1, row, rows)), target.narrow(1, row, rows));
        row += rows;
      } else {
        for (size_t i = first; i < end; row += micro_batches[i++]) {
          const auto x = data.narrow(1, row, micro_batches[i]);
          const auto part = torch::mse_loss(net.forward(x), target.narrow(1, row, micro_batches[i])) /
                            static_cast<double>(end - first);
          loss = loss.defined() ? loss + part : part;
        }
      }
      loss.backward();
      optimizer.step();
    }
  }

  /// The same in micro-batches of one rank.
  template <class Model>
  void train(Model& model, GradientAccumulation& accumulation, int rank) const {
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    int64_t row = 0;
    int64_t groups = 0;
    for (const int64_t size : micro_batches) {
      auto micro = accumulation.next();
      const auto x = data[rank].narrow(0, row, size);
      micro.backward(torch::mse_loss(model.forward(x), target[rank].narrow(0, row, size)));
      if (micro.is_last()) {
        optimizer.step();
        optimizer.zero_grad();
        ++groups;
      }
      row += size;
    }
    EXPECT_EQ(groups, accumulation.groups());
    accumulation.reset();
  }
};

TEST(GradientAccumulation, EqualsOneLargeBatch) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    run_ranks(ranks, [ranks](int rank) {
      auto world = init_process_group();
      auto expected = make_net();
      DistributedDataParallel<Net> model(make_net());
      // Groups of 3, 3 and 2 equal micro-batches, two epochs with one object.
      GradientAccumulation equal(model, {.steps = 3, .micro_batches = 8});
      for (uint64_t epoch = 0; epoch < 2; ++epoch) {
        const Epoch data(ranks, std::vector<int64_t>(8, 4), 10 * epoch);
        data.train_at_once(*expected, 3, /*by_sample=*/true);
        data.train(model, equal, rank);
      }
      expect_same_state(*model.module, *expected);
      // 18 samples by 4: groups of 12 and 4 + 2.
      const Epoch uneven(ranks, {4, 4, 4, 4, 2}, 30);
      GradientAccumulation by_sample(model, {.steps = 3, .samples = 18, .batch_size = 4});
      uneven.train_at_once(*expected, 3, /*by_sample=*/true);
      uneven.train(model, by_sample, rank);
      expect_same_state(*model.module, *expected);
      // The same, where each micro-batch counts the same.
      GradientAccumulation by_batch(model, {.steps = 3, .micro_batches = 5});
      uneven.train_at_once(*expected, 3, /*by_sample=*/false);
      uneven.train(model, by_batch, rank);
      expect_same_state(*model.module, *expected);
    });
  }
}

TEST(GradientAccumulation, ScalesForAPlainModuleToo) {
  auto expected = make_net();
  auto net = make_net();
  const Epoch data(1, {4, 4, 4, 4, 2}, 5);
  data.train_at_once(*expected, 2, true);
  GradientAccumulation accumulation(*net, {.steps = 2, .samples = 18, .batch_size = 4});
  data.train(*net, accumulation, 0);
  expect_same_state(*net, *expected);
}

TEST(GradientAccumulation, ReducesOnlyWithTheLastOfAGroup) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel<Net> model(make_net());
    const auto loss = [&](uint64_t seed) { return model(random({4, 6}, 100 * seed + rank)).square().sum(); };
    for (uint64_t step = 0; step < 3; ++step) loss(step).backward();  // buckets get their final order
    auto before = collectives();
    loss(3).backward();
    const auto of_one_step = collectives() - before;
    EXPECT_GT(of_one_step, 0);

    GradientAccumulation accumulation(model, {.steps = 4});  // without an end
    for (uint64_t index = 0; index < 12; ++index) {
      if (index % 4 == 0) model.zero_grad();
      before = collectives();
      auto micro = accumulation.next();
      EXPECT_EQ(micro.index(), static_cast<int64_t>(index % 4));
      EXPECT_EQ(micro.share(), 0.25);
      micro.backward(loss(10 + index));
      EXPECT_EQ(micro.is_last(), index % 4 == 3);
      EXPECT_EQ(collectives() - before, micro.is_last() ? of_one_step : 0) << index;
      // Local before, the same on both ranks after.
      auto sum = model.module->first->weight.grad().detach().clone();
      all_reduce(sum);
      EXPECT_EQ(at::allclose(sum, 2 * model.module->first->weight.grad()), micro.is_last()) << index;
    }
  });
}

TEST(GradientAccumulation, CountsThatOnlyTheDataTell) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel<Net> model(make_net());
    // Rank 0 has 3 + 1 rows, rank 1 has 2 + 4: the mean over all ten.
    const std::vector<std::vector<int64_t>> rows{{3, 1}, {2, 4}};
    const std::vector<torch::Tensor> data{random({4, 6}, 1), random({6, 6}, 2)};
    auto expected = make_net();
    expected->forward(torch::cat(data)).square().sum(1).mean().backward();
    GradientAccumulation accumulation(model, {.steps = 2});
    int64_t row = 0;
    for (const int64_t size : rows[rank]) {
      auto micro = accumulation.next(static_cast<double>(size), /*of=*/10.0 / 2);
      const auto output = model(data[rank].narrow(0, row, size));
      // The loss scaled by the caller's own means.
      micro.scale(output.square().sum(1).mean()).backward();
      row += size;
    }
    EXPECT_TRUE(at::allclose(model.module->last->weight.grad(), expected->last->weight.grad(), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(model.module->first->bias.grad(), expected->first->bias.grad(), 1e-12, 1e-12));
  });
}

TEST(GradientAccumulation, AnExceptionLeavesTheModelSynchronising) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel<Net> model(make_net());
    const auto loss = [&] { return model(random({4, 6}, rank)).square().sum(); };
    GradientAccumulation accumulation(model, {.steps = 3, .micro_batches = 6});
    EXPECT_THROW(
        {
          auto micro = accumulation.next();
          loss();
          throw std::runtime_error("the data ended");
        },
        std::runtime_error);
    EXPECT_THAT(message_of<c10::Error>([&] { (void)accumulation.next(); }),
                HasSubstr("micro-batch 0 of this epoch ended without backward()"));
    model.zero_grad();
    loss().backward();
    auto sum = model.module->first->weight.grad().detach().clone();
    all_reduce(sum);
    EXPECT_TRUE(at::allclose(sum, 2 * model.module->first->weight.grad())) << "reduced, as before";
    accumulation.reset();
    {
      auto micro = accumulation.next();
      EXPECT_EQ(micro.index(), 0);
      EXPECT_THROW(micro.backward(torch::ones({}, at::kDouble)), c10::ValueError);
      micro.backward(loss());
    }
    {
      // Inside of the program's own no_sync() nothing is reduced, and that goes on after ours.
      auto outer = model.no_sync();
      { (void)accumulation.next().backward(loss()); }
      const auto before = collectives();
      loss().backward();
      EXPECT_EQ(collectives(), before);
    }
  });
}

TEST(GradientAccumulation, MisuseIsNamed) {
  auto net = make_net();
  const auto loss = [&] { return net->forward(random({4, 6}, 1)).sum(); };
  GradientAccumulation accumulation(*net, {.steps = 2, .micro_batches = 3});
  EXPECT_EQ(accumulation.groups(), 2);
  {
    auto micro = accumulation.next();
    EXPECT_THAT(message_of<c10::Error>([&] { (void)accumulation.next(); }), HasSubstr("is alive"));
    EXPECT_THAT(message_of<c10::Error>([&] { accumulation.reset(); }), HasSubstr("is alive"));
    micro.backward(loss());
    EXPECT_THAT(message_of<c10::Error>([&] { micro.backward(loss()); }), HasSubstr("a second backward()"));
    EXPECT_THAT(message_of<c10::Error>([&] { (void)micro.scale(loss()); }), HasSubstr("a second backward()"));
  }
  {
    const auto early = loss();
    auto micro = accumulation.next();
    EXPECT_TRUE(micro.is_last());
    EXPECT_THAT(message_of<c10::Error>([&] { micro.backward(early); }), HasSubstr("computed before next()"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { micro.backward(early.detach()); }),
                HasSubstr("does not require a gradient"));
    micro.backward(loss());
  }
  {
    auto micro = accumulation.next();
    EXPECT_TRUE(micro.is_last()) << "a group of one";
    EXPECT_EQ(micro.share(), 1);
    micro.backward(loss());
  }
  EXPECT_THAT(message_of<c10::Error>([&] { (void)accumulation.next(); }),
              HasSubstr("all 3 micro-batches of the epoch are done"));
  EXPECT_THAT(message_of<c10::Error>([&] { (void)accumulation.next(1, 2); }), HasSubstr("are done"));
  accumulation.reset();
  EXPECT_THROW((void)accumulation.next(1, 0), c10::ValueError);
  EXPECT_THROW((void)accumulation.next(-1, 2), c10::ValueError);
  const auto refuse = [&](const GradientAccumulationOptions& options) {
    EXPECT_THROW(GradientAccumulation(*net, options), c10::ValueError);
  };
  refuse({.steps = 0});
  refuse({.micro_batches = -1});
  refuse({.samples = 3});
  refuse({.samples = 3, .batch_size = 0});
  refuse({.micro_batches = 1, .samples = 3, .batch_size = 2});
}

}  // namespace
}  // namespace lockstep::gradient_accumulation_test

// FullyShardedDataParallel on devices: what goes wrong there, and how it is told.
#include <gmock/gmock.h>
#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/device_training.h>
#include <lockstep/parallel/fsdp/testing/killed_rank.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::fsdp_device_misuse_test {
namespace {

using fsdp_test::kWidth;
using fsdp_test::loss_of;
using fsdp_test::make_deep_net;
using fsdp_test::make_small_net;
using fsdp_test::own_device;
using fsdp_test::trained;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::test_device;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = FullyShardedDataParallelOptions;

/// The n-th gather of a step: one in forward, one in backward.
TEST(FsdpOnDevice, AFailedGatherIsThrownOnAllRanksAndNoStepIsTaken) {
  for (const int gather_number : {2, 6}) {
    run_ranks(2, [&](int rank) {
      auto world = init_process_group();
      FullyShardedDataParallel model(
          make_deep_net(),
          {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .device_id = own_device()});
      const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
      const auto x = testing::random({3, kWidth}, static_cast<uint64_t>(rank), at::kFloat);
      const auto train = [&] {
        optimizer->zero_grad();
        model.forward(x).sum().backward();
        optimizer->step();
      };
      train();
      train();
      const auto before = testing::copies(model.parameters());
      if (rank == 1)
        failpoint::configure("fsdp_gather=error(the device is lost)@" + std::to_string(gather_number));
      EXPECT_THAT(message_of<c10::Error>(train), HasSubstr(rank == 1 ? "the device is lost" : "rank 1"));
      EXPECT_THROW(optimizer->step(), c10::Error);
      EXPECT_THROW(model.forward(x), c10::Error);
      EXPECT_TRUE(testing::equal(model.parameters(), before));
    });
  }
}

TEST(FsdpOnDevice, ADeadRankIsNamedOnAll) {
  fsdp_test::expect_a_killed_rank_is_named(
      {.ranks = 3, .victim = 1, .last_operation = 16, .every = 5, .gathers = true, .where = ".*"},
      {.device_id = test_device()});
}

TEST(FsdpOnDevice, AFailedBackwardIsToldToStepAndForward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    FullyShardedDataParallel model(make_small_net(), {.device_id = own_device()});
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    auto x = testing::random({4, 3}, static_cast<uint64_t>(rank), at::kFloat).to(own_device());
    x.requires_grad_();
    // After the weights' gradients.
    x.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "of the program's own"); });
    EXPECT_THAT(message_of<c10::Error>([&] { loss_of(model.forward(x)).backward(); }),
                HasSubstr("of the program's own"));
    // The group has failed, which names the cause.
    EXPECT_THAT(message_of<c10::Error>([&] { optimizer->step(); }),
                HasSubstr(") failed in backward: of the program's own"));
    EXPECT_THAT(message_of<c10::Error>([&] { model.forward(x); }),
                HasSubstr("the last backward did not end"));
  });
}

TEST(FsdpOnDevice, ABackwardThatFailsBeforeItsGradientsIsNoLastOne) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const Options options{.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(5),
                          .device_id = own_device()};
    const auto model =
        std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(make_small_net(), options);
    const auto optimizer = model->make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
    const auto output = model->forward(testing::random({4, 3}, 99, at::kFloat));
    // Its graph is used in no other way, so that buffers alone have changed.
    output.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "of the program's own"); });
    EXPECT_THAT(message_of<c10::Error>([&] { loss_of(output).backward(); }),
                HasSubstr("of the program's own"));
    {
      const auto no_sync = model->no_sync();
      auto x = testing::random({4, 3}, 98, at::kFloat).to(own_device()).requires_grad_();
      x.register_hook([](const torch::Tensor&) { TORCH_CHECK(false, "under no_sync"); });
      EXPECT_THAT(message_of<c10::Error>([&] { loss_of(model->forward(x)).backward(); }),
                  HasSubstr("under no_sync"));
    }
    optimizer->zero_grad();
    EXPECT_EQ(trained(model, rank, *optimizer).size(),
              make_small_net()->named_parameters().size() + make_small_net()->named_buffers().size());
  });
}

TEST(FsdpOnDevice, BackwardWithinSummonFullParamsIsAnError) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    FullyShardedDataParallel model(make_small_net(), {.device_id = own_device()});
    const auto loss =
        loss_of(model.forward(testing::random({4, 3}, static_cast<uint64_t>(rank), at::kFloat)));
    EXPECT_THAT(message_of<c10::Error>([&] { model.summon_full_params([&] { loss.backward(); }); }),
                HasSubstr("FullyShardedDataParallel"));
  });
}

TEST(FsdpOnDevice, WhatCanNotBeSaysWhy) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto refused = [&](const nn::Sequential& net, const Options& options) {
      return message_of<c10::Error>([&] { FullyShardedDataParallel model(net, options); });
    };
    EXPECT_THAT(refused(make_small_net(), {.device_id = c10::Device(test_device().type(), 100)}),
                HasSubstr("100"));
    auto net = make_small_net();
    net[0]->as<nn::Linear>()->to(own_device());
    EXPECT_THAT(refused(net, {}), HasSubstr("a sharded model is on one device"));
    Options one_alone;
    if (rank == 0) one_alone.device_id = own_device();
    EXPECT_THAT(refused(make_small_net(), one_alone),
                ::testing::AnyOf(HasSubstr("gathers in another way"), HasSubstr("failed to be wrapped")));
  });
}

}  // namespace
}  // namespace lockstep::fsdp_device_misuse_test

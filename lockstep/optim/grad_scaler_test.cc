// What PyTorch has no answer for: several ranks, nests of tensors, recovery. grad_scaler_parity_test.py
// compares the rest.
#include <gmock/gmock.h>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/gradient_accumulation.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::grad_scaler_test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

GradScalerOptions on_cpu(double init_scale = 8, std::optional<ProcessGroup> group = {}) {
  return {.device = at::kCPU, .init_scale = init_scale, .growth_interval = 2, .process_group = group};
}

torch::Tensor parameter(double value = 1) {
  return torch::full({3}, value).requires_grad_();
}

/// The gradient of the scaled loss is scale · gradient.
void backward(GradScaler& scaler, const torch::Tensor& parameter, double gradient) {
  parameter.mutable_grad().reset();
  scaler.scale((parameter * gradient).sum()).backward();
}

bool same_on_all_ranks(double number) {
  const auto mine = torch::tensor({number}, at::kDouble);
  auto low = mine.clone(), high = mine.clone();
  all_reduce(low, ReduceOp::MIN);
  all_reduce(high, ReduceOp::MAX);
  return low.equal(high);
}

TEST(GradScaler, ScalesNests) {
  GradScaler scaler(on_cpu(4));
  const auto one = torch::ones({2});
  EXPECT_TRUE(scaler.scale(one).equal(torch::full({2}, 4.0)));
  EXPECT_TRUE(one.equal(torch::ones({2})));
  const std::map<std::string, std::pair<torch::Tensor, std::vector<torch::Tensor>>> nest{
      {"a", {one, {one * 2, torch::Tensor()}}}, {"b", {one * 3, {}}}};
  const auto scaled = scaler.scale(nest);
  EXPECT_TRUE(scaled.at("a").first.equal(one * 4));
  EXPECT_TRUE(scaled.at("a").second[0].equal(one * 8));
  EXPECT_FALSE(scaled.at("a").second[1].defined());
  EXPECT_TRUE(scaled.at("b").first.equal(one * 12));
  EXPECT_TRUE(nest.at("a").first.equal(one)) << "not in place";
  const auto [first, number] = scaler.scale(std::make_tuple(one, 7));
  EXPECT_TRUE(first.equal(one * 4));
  EXPECT_EQ(number, 7);
  EXPECT_TRUE(scaler.scale(std::vector<torch::Tensor>()).empty());
  const auto dict = scaler.scale(c10::IValue(std::vector<torch::Tensor>{one}));
  EXPECT_TRUE(dict.toTensorVector()[0].equal(one * 4));

  const std::vector<torch::Tensor> owner{one};
  EXPECT_THAT(message_of<c10::ValueError>([&] { scaler.scale(at::TensorList(owner)); }),
              HasSubstr("1 of the tensors lie behind pointers or views"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { scaler.scale(torch::Tensor()); }),
              HasSubstr("outputs must be a Tensor or an iterable of Tensors"));
}

TEST(GradScaler, HalfOutputsStayHalfAndBFloat16LossesAreScaledInFloat32) {
  GradScaler scaler(on_cpu(4));
  EXPECT_EQ(scaler.scale(torch::ones({2}, at::kHalf)).scalar_type(), at::kHalf);
  EXPECT_EQ(scaler.scale(torch::tensor(1.0, at::kBFloat16)).scalar_type(), at::kFloat)
      << "both of no dimension";
}

TEST(GradScaler, BadOptionsAreRefused) {
  const auto refused = [](GradScalerOptions options) {
    options.device = at::kCPU;
    return message_of<c10::ValueError>([&] { GradScaler scaler(options); });
  };
  EXPECT_THAT(refused({.growth_factor = 1.0}), HasSubstr("The growth factor must be > 1.0. It is 1"));
  EXPECT_THAT(refused({.growth_factor = std::nan("")}), HasSubstr("The growth factor must be > 1.0."));
  EXPECT_THAT(refused({.backoff_factor = 1.5}), HasSubstr("The backoff factor must be < 1.0. It is 1.5"));
  GradScaler off({.device = at::kCPU, .growth_factor = 0.5, .enabled = false});
  EXPECT_FALSE(off.is_enabled());
}

TEST(GradScaler, DisabledItOnlySteps) {
  std::vector<std::unique_ptr<GradScaler>> scalers;
  scalers.push_back(std::make_unique<GradScaler>(GradScalerOptions{.device = at::kCPU, .enabled = false}));
  if (cuda_device_count() == 0) {
    ::testing::internal::CaptureStderr();
    scalers.push_back(std::make_unique<GradScaler>());
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("CUDA is not available.  Disabling"));
  }
  for (auto& scaler : scalers) {
    const auto weight = parameter();
    optim::SGD optimizer({weight}, 0.5);
    EXPECT_FALSE(scaler->is_enabled());
    EXPECT_EQ(scaler->get_scale(), 1.0);
    EXPECT_TRUE(scaler->state_dict().empty());
    scaler->load_state_dict({});
    scaler->update();
    const auto loss = weight.sum();
    EXPECT_TRUE(scaler->scale(loss).is_same(loss));
    loss.backward();
    scaler->unscale_(optimizer);
    int called = 0;
    scaler->step(optimizer, [&] {
      ++called;
      return loss;
    });
    EXPECT_EQ(called, 1) << "a closure is the optimizer's business";
    EXPECT_TRUE(weight.equal(torch::full({3}, 0.5)));
  }
}

TEST(GradScaler, ClosuresAndForeignScalesAreRefused) {
  GradScaler scaler(on_cpu());
  const auto weight = parameter();
  optim::SGD optimizer({weight}, 0.5);
  backward(scaler, weight, 1);
  EXPECT_THAT(message_of<c10::Error>([&] { scaler.step(optimizer, [] { return torch::Tensor(); }); }),
              HasSubstr("Closure use is not currently supported if GradScaler is enabled."));
  for (const auto& bad : {torch::ones({2}), torch::Tensor(), torch::ones({1}, torch::requires_grad()),
                          torch::ones({1}, at::kMeta)}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { scaler.update(bad); }), HasSubstr("new_scale should be"));
  }
  scaler.step(optimizer);
  scaler.update(torch::full({1, 1}, 32.0));
  EXPECT_EQ(scaler.get_scale(), 32);
}

TEST(GradScaler, AParameterUnderTwoNamesIsUnscaledOnce) {
  GradScaler scaler(on_cpu());
  const auto weight = parameter();
  optim::SGD optimizer(std::vector<torch::Tensor>{weight, weight}, 0.5);
  backward(scaler, weight, 3);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(weight.grad().equal(torch::full({3}, 3.0)));
}

TEST(GradScaler, StateIsPythonsAndLoadsWholeOrNotAtAll) {
  GradScaler scaler(on_cpu());
  const auto weight = parameter();
  optim::SGD optimizer({weight}, 0.5);
  for (const float gradient : {1.0f, 1.0f, 1.0f}) {
    backward(scaler, weight, gradient);
    scaler.step(optimizer);
    scaler.update();
  }
  const auto state = scaler.state_dict();
  EXPECT_EQ(state.size(), 5);
  EXPECT_EQ(state.at("scale").toDouble(), 16);
  EXPECT_EQ(state.at("growth_interval").toInt(), 2);
  EXPECT_EQ(state.at("_growth_tracker").toInt(), 1);

  GradScaler other({.device = at::kCPU});
  other.load_state_dict(state);  // before its first scale()
  EXPECT_EQ(other.get_scale(), 16);
  EXPECT_EQ(other.get_growth_interval(), 2);
  (void)other.scale(weight);
  auto changed = state;
  changed["scale"] = 4.0;
  other.load_state_dict(changed);
  EXPECT_EQ(other.state_dict().at("scale").toDouble(), 4);
  changed.erase("_growth_tracker");
  changed["scale"] = 2.0;
  EXPECT_THAT(message_of<c10::ValueError>([&] { other.load_state_dict(changed); }),
              HasSubstr("GradScaler::load_state_dict: the state has no '_growth_tracker'"));
  EXPECT_EQ(other.get_scale(), 4);
  EXPECT_THAT(message_of<c10::Error>([&] { other.load_state_dict({}); }),
              HasSubstr("The source state dict is empty, possibly because it was saved from a disabled"));
}

TEST(GradScaler, ADdpStepIsSkippedEverywhereWithoutAWord) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel<nn::LinearImpl> model(std::make_shared<nn::LinearImpl>(4, 2));
    optim::SGD optimizer(model.parameters(), 0.1);
    GradScaler scaler(on_cpu());
    const auto step = [&](double factor) {
      optimizer.zero_grad();
      scaler.scale(model(torch::ones({3, 4})).sum() * factor).backward();
      const auto before = model.module->weight.detach().clone();
      const auto count = [] { return default_group()->getBackend(at::kCPU)->getSequenceNumberForGroup(); };
      const auto operations = count();
      scaler.unscale_(optimizer);
      clip_grad_norm_(model.parameters(), 1.0);
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(count(), operations) << "no communication";
      return !model.module->weight.equal(before);
    };
    EXPECT_TRUE(step(1));
    EXPECT_FALSE(step(rank == 1 ? kInfinity : 1.0));
    EXPECT_EQ(scaler.get_scale(), 4);
    EXPECT_TRUE(step(1));
    EXPECT_TRUE(same_on_all_ranks(scaler.get_scale()));
    EXPECT_TRUE(same_on_all_ranks(model.module->weight.sum().item<double>()));
  });
}

TEST(GradScaler, RanksWithGradientsOfTheirOwnAgreeIfTold) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto run = [&](std::optional<ProcessGroup> group, double gradient) {
      GradScaler scaler(on_cpu(8, group));
      const auto weight = parameter();
      optim::SGD optimizer({weight}, 0.5);
      backward(scaler, weight, gradient);
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(weight.equal(torch::ones({3})), scaler.get_scale() == 4) << "skipped, and backed off";
      return scaler.get_scale();
    };
    const double mine = rank == 1 ? std::nan("") : 1.0;
    EXPECT_EQ(run({}, mine), rank == 1 ? 4 : 8) << "each for itself";
    EXPECT_EQ(run(ProcessGroup(), mine), 4);
    EXPECT_EQ(run(default_group(), mine), 4);
    EXPECT_EQ(run(ProcessGroup(), 1.0), 8);

    // A rank without gradients has a say, and steps with the others; if no rank has any, all are told.
    GradScaler scaler(on_cpu(8, ProcessGroup()));
    const auto weight = parameter();
    optim::SGD optimizer({weight}, 0.5);
    (void)scaler.scale(weight);
    EXPECT_THAT(message_of<c10::Error>([&] { scaler.step(optimizer); }),
                HasSubstr("No inf checks were recorded for this optimizer."));
    scaler.reset();
    if (rank == 0) backward(scaler, weight, 1);
    scaler.step(optimizer);
    scaler.update();
    if (rank == 0) backward(scaler, weight, kInfinity);
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);

    const auto others = new_group({0});
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { GradScaler outside(on_cpu(8, others)); }),
                  HasSubstr("not in the process group"));
    }
  });
}

TEST(GradScaler, OptimizersThatCommunicateAgreeByThemselves) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto run = [&](auto make_optimizer) {
      const auto a = parameter(), b = parameter();
      auto optimizer = make_optimizer(std::vector<torch::Tensor>{a, b});
      GradScaler scaler(on_cpu());
      const auto step = [&](double gradient) {
        a.mutable_grad().reset();
        backward(scaler, b, gradient);
        scaler.scale(a.sum()).backward();
        scaler.step(*optimizer);
        scaler.update();
      };
      step(1);
      EXPECT_EQ(scaler.get_scale(), 8);
      step(rank == 1 ? kInfinity
                     : 1);  // only b's, and only here: a rank alone in its step would wait forever
      EXPECT_EQ(scaler.get_scale(), 4);
      EXPECT_TRUE(a.equal(torch::full({3}, 0.5)));
      EXPECT_TRUE(b.equal(torch::full({3}, 0.5)));
      step(1);
      EXPECT_TRUE(b.equal(torch::zeros({3})));
    };
    run([](std::vector<torch::Tensor> parameters) {
      return std::make_unique<ZeroRedundancyOptimizer>(std::move(parameters),
                                                       optimizer_class<optim::SGD>(optim::SGDOptions(0.5)));
    });
    run([](std::vector<torch::Tensor> parameters) {
      return std::make_unique<PostLocalSGDOptimizer>(std::make_unique<optim::SGD>(parameters, 0.5),
                                                     std::make_shared<PeriodicModelAverager>(2));
    });

    const auto weight = parameter();
    ZeroRedundancyOptimizer overlapping({weight}, optimizer_class<optim::SGD>(optim::SGDOptions(0.5)),
                                        {.overlap_with_ddp = true});
    GradScaler scaler(on_cpu());
    backward(scaler, weight, 1);
    EXPECT_THAT(message_of<c10::Error>([&] { scaler.step(overlapping); }),
                HasSubstr("`overlap_with_ddp=True`"));
  });
}

TEST(GradScaler, UnderZeroAndDdpItTrainsAsWithAPlainOptimizer) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto train = [&](bool zero) {
      torch::manual_seed(5);
      auto net = std::make_shared<nn::LinearImpl>(6, 4);
      DistributedDataParallel<nn::LinearImpl> model(net);
      std::unique_ptr<optim::Optimizer> optimizer;
      if (zero) {
        optimizer = std::make_unique<ZeroRedundancyOptimizer>(
            model.parameters(), optimizer_class<optim::Adam>(optim::AdamOptions(0.01)));
      } else {
        optimizer = std::make_unique<optim::Adam>(model.parameters(), optim::AdamOptions(0.01));
      }
      GradScaler scaler(on_cpu(1024));
      GradientAccumulation accumulation(model, {.steps = 2});
      for (int i = 0; i < 12; ++i) {
        auto micro = accumulation.next();
        torch::Tensor loss;
        {
          auto guard = autocast(at::kCPU);
          loss = model(torch::full({3, 6}, rank + 0.1 * i)).square().mean();
        }
        if (i == 5 && rank == 1) loss = loss * kInfinity;
        scaler.scale(micro.scale(loss)).backward();
        if (!micro.is_last()) continue;
        scaler.unscale_(*optimizer);
        clip_grad_norm_(model.parameters(), 0.5);
        scaler.step(*optimizer);
        scaler.update();
        optimizer->zero_grad();
      }
      EXPECT_EQ(scaler.get_scale(), 2048) << "grown once, backed off once, grown once";
      return net->weight.detach().clone();
    };
    EXPECT_TRUE(train(true).equal(train(false)));
  });
}

TEST(GradScaler, AFailedAgreementLeavesItAsBeforeTheIteration) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    GradScaler scaler(on_cpu(8, ProcessGroup()));
    const auto a = parameter(), b = parameter();
    optim::SGD first({a}, 0.5), second({b}, 0.5);
    const auto iterate = [&](bool fails) {
      backward(scaler, a, 1);
      backward(scaler, b, rank == 1 ? kInfinity : 1);
      scaler.unscale_(first);
      if (fails && rank == 1) {
        all_reduce(torch::ones({5}));  // another collective than the others': all are told
      } else {
        scaler.unscale_(second);
      }
      scaler.step(first);
      scaler.step(second);
      scaler.update();
    };
    backward(scaler, a, 1);
    scaler.step(first);
    scaler.update();
    const auto before = scaler.state_dict();
    const auto values = a.detach().clone();
    EXPECT_FALSE(message_of<c10::DistBackendError>([&] { iterate(true); }).empty());
    if (rank == 1) scaler.reset();  // its own collective failed, not the scaler's
    for (const auto& [key, value] : scaler.state_dict()) EXPECT_EQ(value, before.at(key)) << key;
    EXPECT_TRUE(a.equal(values));

    scaler.update_process_group(shrink_group());
    iterate(false);
    EXPECT_EQ(scaler.get_scale(), 4) << "from the old scale";
    EXPECT_TRUE(a.equal(torch::zeros({3})));
    EXPECT_TRUE(b.equal(torch::ones({3})));
  });
}

TEST(GradScaler, RecoveryBringsItsStateToWhoIsBehindAndCountsASkippedStep) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    DistributedDataParallel<nn::LinearImpl> model(std::make_shared<nn::LinearImpl>(4, 2));
    optim::SGD optimizer(model.parameters(), 0.1);
    GradScaler scaler(on_cpu());
    const auto backward = [&](double factor) {
      optimizer.zero_grad();
      scaler.scale(model(torch::ones({3, 4})).sum() * factor).backward();
    };
    const auto step = [&] {
      scaler.step(optimizer);
      scaler.update();
    };
    backward(1), step();
    backward(kInfinity);
    if (rank == 0) {
      step();  // a skipped one
    } else {
      scaler.unscale_(optimizer);  // rank 1 lost its way here
    }
    EXPECT_EQ(scaler.get_scale(), rank == 0 ? 4 : 8);
    EXPECT_EQ(model.update_process_group(new_group(), {optimizer, scaler}), 2);
    EXPECT_EQ(scaler.get_scale(), 4);
    EXPECT_EQ(scaler.state_dict().at("_growth_tracker").toInt(), 0);
    backward(1), step();
    EXPECT_EQ(scaler.state_dict().at("_growth_tracker").toInt(), 1);
  });
}

}  // namespace
}  // namespace lockstep::grad_scaler_test

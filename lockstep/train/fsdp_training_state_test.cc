// States of a FullyShardedDataParallel and its optimizer, without a Trainer: in files, and loaded together.
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/serialization/object_conversion.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/train/testing/fixtures.h>

namespace lockstep::fsdp_training_state_test {
namespace {

using testing::expect_close;
using testing::message_of;
using testing::SharedFolder;
using testing::SmallNet;

TEST(FsdpTrainingState, ShardsInFilesAreReadByAnyNumberOfRanks) {
  const SharedFolder folder;
  const testing::RunRanksOptions options{.environment = folder.environment()};
  const auto path = folder.path() / "step";
  const auto sharded = [](const auto& action) {
    FullyShardedDataParallel<SmallNet> model(std::make_shared<SmallNet>());
    const auto optimizer = model.make_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
    const auto train = [&](int64_t from) {
      const int64_t share = 12 / get_world_size();
      for (int64_t step = from; step < from + 3; ++step) {
        optimizer->zero_grad();
        const auto x = testing::random({12, 4}, static_cast<uint64_t>(step));
        model(x.narrow(0, get_rank() * share, share)).square().mean().backward();
        optimizer->step();
      }
    };
    action(model, *optimizer, train);
    return model.full_state_dict();
  };
  testing::run_ranks(
      2,
      [&](int) {
        auto world = init_process_group();
        (void)sharded([&](auto& model, auto& optimizer, const auto& train) {
          train(0);
          save_checkpoint(path, {},
                          {{"model", to_object(model.sharded_state_dict())},
                           {"optimizer", to_object(model.sharded_optim_state_dict(optimizer))}},
                          {.step = 3});
        });
      },
      options);
  for (const int ranks : {1, 3, 4}) {
    testing::run_ranks(
        ranks,
        [&](int) {
          auto world = init_process_group();
          const auto actual = sharded([&](auto& model, auto& optimizer, const auto& train) {
            const auto info = read_checkpoint_info(path);
            std::vector<fsdp::ShardedStateDict> weights;
            std::vector<StateDict> states;
            for (int64_t writer = 0; writer < info.world_size; ++writer) {
              const auto part =
                  load_checkpoint(path, {.rank = writer, .world_size = info.world_size}).rank_state;
              weights.push_back(from_object<fsdp::ShardedStateDict>(part.at("model")));
              states.push_back(from_object<StateDict>(part.at("optimizer")));
            }
            model.load_sharded_state_dict(weights);
            model.load_sharded_optim_state_dict(optimizer, states);
            train(3);
          });
          expect_close(actual, sharded([](auto&, auto&, const auto& train) { train(0), train(3); }));
        },
        options);
  }
}

/// A part of the state that may refuse.
struct Counter {
  int64_t value = 0;
  bool refuses = false;
  StateDict state_dict() const { return {{"value", value}}; }
  void load_state_dict(const StateDict& state) {
    TORCH_CHECK_VALUE(!refuses, "the counter is full");
    value = state.at("value").toInt();
  }
};

void add_tensors(const c10::IValue& value, const std::string& path, StateDict& tensors) {
  if (value.isTensor()) tensors.emplace(path, value);
  if (!value.isGenericDict()) return;
  for (const auto& entry : value.toGenericDict()) {
    add_tensors(entry.value(), path + "." + entry.key().toStringRef(), tensors);
  }
}

/// The tensors of a state, by their paths in it.
StateDict flat(const c10::IValue& state) {
  StateDict tensors;
  add_tensors(state, "", tensors);
  return tensors;
}

TEST(FsdpTrainingState, AStateIsLoadedOnAllRanksOrOnNone) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool gather : {false, true}) {
      FullyShardedDataParallel model(std::make_shared<SmallNet>(), {.gather = gather});
      const auto optimizer = model.make_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
      Counter counter;
      TrainingState state;
      state.add_model("model", model);
      state.add_optimizer("optimizer", *optimizer, model);
      state.add("counter", counter);
      const auto train = [&] {
        optimizer->zero_grad();
        model(testing::random({3, 4}, static_cast<uint64_t>(rank))).square().mean().backward();
        optimizer->step();
        ++counter.value;
      };
      const auto whole = [&] {
        std::vector<c10::IValue> states{to_object(state.state_dict())};  // rank 0 has all
        broadcast_object_list(states);
        return from_object<StateDict>(states[0]);
      };
      const auto expect_is = [&](const StateDict& expected) {
        const StateDict now = whole();
        for (const char* part : {"model", "optimizer"}) {
          expect_close(flat(now.at(part)), flat(expected.at(part)));
        }
        EXPECT_EQ(counter.value, from_object<StateDict>(expected.at("counter")).at("value").toInt());
      };
      train();
      const StateDict good = whole();
      train();
      const StateDict before = whole();
      const std::string name = model.named_parameters().front().first;
      for (const std::string damaged : {"model", "optimizer", "counter", "rest"}) {
        StateDict given = good;
        if (rank == 1) {
          auto part = from_object<StateDict>(given.at(damaged == "rest" ? "model" : damaged));
          if (damaged == "model") {
            part.erase(name);
          } else if (damaged == "optimizer") {
            auto states = from_object<StateDict>(part.at("state"));
            auto own = from_object<StateDict>(states.at(name));
            own["exp_avg"] = torch::zeros({1, 1, 1});
            states[name] = to_object(own);
            part["state"] = to_object(states);
          }
          given[damaged == "rest" ? "model" : damaged] = to_object(part);
          if (damaged == "rest") given.erase("optimizer");
        }
        counter.refuses = rank == 1 && damaged == "counter";
        const auto text = message_of<c10::Error>([&] { state.load_state_dict(given); });
        counter.refuses = false;
        const auto cause = ::testing::HasSubstr(damaged == "optimizer" ? "has sizes"
                                                : damaged == "counter" ? "the counter is full"
                                                : damaged == "model"   ? '"' + name + '"'
                                                                       : "optimizer");
        EXPECT_THAT(text, cause) << damaged;
        if (rank != 1) {
          EXPECT_THAT(text, ::testing::HasSubstr("nothing was loaded, for other ranks can't: rank 1: "));
        }
        expect_is(before);
      }
      // The memory of a whole model is needed at the end, when the counter has loaded.
      if (rank == 1) failpoint::configure("fsdp.summon.allocate=error(no memory)");
      EXPECT_THAT(message_of<c10::Error>([&] { state.load_state_dict(good); }),
                  ::testing::HasSubstr(rank == 1 ? "no memory" : "the weights are as they were"));
      failpoint::configure("");
      expect_is(before);
      state.load_state_dict(good);
      expect_is(good);
    }
  });
}

/// A wrapper as a member.
struct Nested : torch::nn::Module {
  explicit Nested(const FullyShardedDataParallelOptions& options)
      : part(std::make_shared<FullyShardedDataParallel<SmallNet>>(std::make_shared<SmallNet>(), options)) {
    register_module("part", part);
    last->to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(part->forward(x)); }
  std::shared_ptr<FullyShardedDataParallel<SmallNet>> part;
  torch::nn::Linear last = register_module("last", torch::nn::Linear(1, 1));
};

TEST(FsdpTrainingState, AStateHasTheWeightsOfWrappersWithinTheModel) {
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    for (const bool gather : {false, true}) {
      const FullyShardedDataParallelOptions options{.sync_module_states = true, .gather = gather};
      FullyShardedDataParallel model(std::make_shared<Nested>(options), options);
      TrainingState state;
      state.add_model("model", model);
      std::vector<c10::IValue> saved{to_object(state.state_dict())};
      broadcast_object_list(saved);
      const StateDict before = model.full_state_dict();
      EXPECT_TRUE(before.contains("part.hidden.weight"));
      model.summon_full_params([&] {
        const torch::NoGradGuard no_grad;
        for (const auto& [name, parameter] : model.module_parameters()) parameter.zero_();
      });
      state.load_state_dict(from_object<StateDict>(saved[0]));
      expect_close(model.full_state_dict(), before);
    }
  });
}

}  // namespace
}  // namespace lockstep::fsdp_training_state_test

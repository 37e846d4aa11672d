// All that a checkpoint holds as one, and random numbers.
#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/checkpoint/testing/named_states.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/optim/averaged_model.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::training_state_test {
namespace {

namespace optim = torch::optim;
using ::testing::AllOf;
using testing::copied;
using ::testing::ElementsAre;
using testing::expect_equal;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::keys_of;
using testing::message_of;
using testing::train;
using Net = testing::NormNet;
using NetImpl = testing::NormNetImpl;

struct Program {
  Program()
      : optimizer(net->parameters(), optim::SGDOptions(0.1).momentum(0.9)),
        schedule(optimizer, 2, 0.5),
        scaler({.device = at::kCPU}) {
    state.add_model("model", net);
    state.add_optimizer("optimizer", optimizer, net);
    state.add("schedule", schedule);
    state.add("scaler", scaler);
    state.add("average", average);
    state.add_rng();
  }
  void run() {
    train(net, optimizer, 0, 2);
    schedule.step();
    average.update_parameters(net);
    at::rand({3});
  }

  Net net;
  optim::SGD optimizer;
  lr_scheduler::StepLR schedule;
  GradScaler scaler;
  swa_utils::AveragedModel<NetImpl> average{net};
  TrainingState state;
};

TEST(TrainingState, LoadsAllPartsOrNone) {
  Program saved;
  saved.run();
  const auto state = copied(saved.state.state_dict());
  const auto of_rank = copied(saved.state.rank_state_dict());
  EXPECT_EQ(keys_of(state),
            (std::vector<std::string>{"average", "model", "optimizer", "rng", "scaler", "schedule"}));
  EXPECT_EQ(keys_of(of_rank), std::vector<std::string>{"rng"});
  const at::Tensor next = at::rand({4});

  Program loaded;
  loaded.state.load_state_dict(state);
  loaded.state.load_rank_state_dict(of_rank);
  EXPECT_TRUE(at::equal(at::rand({4}), next));
  expect_equal(state_dict(loaded.net), state_dict(saved.net));
  expect_equal(state_dict(loaded.average), state_dict(saved.average));
  EXPECT_EQ(loaded.schedule.last_epoch(), 1);
  EXPECT_EQ(loaded.optimizer.state().size(), 6U);

  Program fresh;
  const auto before = copied(fresh.state.state_dict());
  const auto refuses = [&](const std::string& part, const StateDict& inner) {
    auto wrong = state;
    wrong[part] = to_object(inner);
    const auto text = message_of<c10::Error>([&] { fresh.state.load_state_dict(wrong); });
    expect_equal(state_dict(fresh.net), from_object<StateDict>(before.at("model")));
    EXPECT_THAT(fresh.optimizer.state(), IsEmpty());
    EXPECT_EQ(fresh.schedule.last_epoch(), 0);
    return text;
  };
  EXPECT_THAT(refuses("model", {{"x", at::ones({1})}}),
              AllOf(HasSubstr("Unexpected key(s) in state_dict: \"x\""), HasSubstr("while loading 'model'")));
  EXPECT_THAT(refuses("optimizer", {}), HasSubstr("while loading 'optimizer' of a TrainingState"));
  EXPECT_THAT(refuses("schedule", {}), HasSubstr("while loading 'schedule'"));
  // The schedule, loaded before it, is put back.
  EXPECT_THAT(refuses("scaler", {{"scale", 2.0}}), HasSubstr("while loading 'scaler'"));

  auto other = state;
  other.erase("scaler");
  other["more"] = to_object(StateDict{});
  EXPECT_THAT(message_of<c10::Error>([&] { fresh.state.load_state_dict(other); }),
              HasSubstr("TrainingState:\n\tMissing key(s) in state_dict: \"scaler\". "
                        "\n\tUnexpected key(s) in state_dict: \"more\". "));
  const auto keys = fresh.state.load_state_dict(other, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("scaler"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("more"));
  EXPECT_EQ(fresh.schedule.last_epoch(), 1);
}

TEST(TrainingState, NamesArePartsOwn) {
  Net net;
  TrainingState state;
  state.add_model("model", net);
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_model("model", net); }),
              HasSubstr("'model' already"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_model("", net); }), HasSubstr("needs a name"));
  state.add_rng();
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.add_rng(); }), HasSubstr("already"));
}

TEST(RngState, AnotherNumberOfRanksDrawsOtherNumbers) {
  torch::manual_seed(7);
  const at::Tensor first = at::rand({4});
  TrainingState state;
  state.add_rng();
  const auto shared = state.state_dict();
  const auto drawn = [&](int64_t rank, int64_t ranks) {
    derive_rng_state(from_object<StateDict>(shared.at("rng")).at("fingerprint").toInt(), rank, ranks);
    return at::rand({4});
  };
  std::vector<at::Tensor> all{first, drawn(0, 2), drawn(1, 2), drawn(0, 3), drawn(2, 3)};
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(at::equal(all[i], all[j])) << i << ", " << j;
  }
  EXPECT_TRUE(at::equal(drawn(1, 2), all[2]));

  torch::manual_seed(7);
  state.load_state_dict(shared);
  state.load_rank_state_dict({});  // alone: rank 0 of 1
  const at::Tensor derived = at::rand({4});
  EXPECT_TRUE(at::equal(derived, drawn(0, 1)));

  const at::Tensor before = get_rng_state().at("cpu").toTensor();
  for (const c10::IValue& wrong :
       {c10::IValue(3), c10::IValue(at::ones({5}, at::kByte)), c10::IValue(at::ones({5056}, at::kByte))}) {
    message_of<c10::ValueError>([&] { set_rng_state({{"cpu", wrong}}); });
    EXPECT_TRUE(at::equal(get_rng_state().at("cpu").toTensor(), before));
  }
}

}  // namespace
}  // namespace lockstep::training_state_test

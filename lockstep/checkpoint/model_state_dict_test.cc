#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/testing/named_states.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/optim/averaged_model.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::model_state_dict_test {
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
using testing::run_ranks;
using Net = testing::NormNet;
using NetImpl = testing::NormNetImpl;

const std::vector<std::string> kNames{
    "first.bias",        "first.weight",     "norm.bias",   "norm.num_batches_tracked",
    "norm.running_mean", "norm.running_var", "norm.weight", "second.bias",
    "second.weight"};

TEST(ModelStateDict, AllKindsOfModelsHaveTheNamesOfThePlainModule) {
  Net net;
  EXPECT_EQ(keys_of(state_dict(net)), kNames);
  EXPECT_EQ(keys_of(state_dict(*net)), kNames);
  EXPECT_EQ(keys_of(state_dict(net.ptr())), kNames);
  EXPECT_EQ(keys_of(state_dict(torch::nn::AnyModule(net))), kNames);
  EXPECT_EQ(keys_of(state_dict(DataParallel(net, {.num_replicas = 2}))), kNames);
  EXPECT_EQ(keys_of(state_dict(torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::ReLU()))),
            (std::vector<std::string>{"0.bias", "0.weight"}));
  const auto averaged = keys_of(state_dict(swa_utils::AveragedModel(net)));
  EXPECT_EQ(averaged.size(), kNames.size() + 1);
  EXPECT_EQ(averaged.front(), "module.first.bias");
  EXPECT_EQ(averaged.back(), "n_averaged");
  EXPECT_THAT(message_of<c10::ValueError>([] { state_dict(std::shared_ptr<NetImpl>()); }),
              HasSubstr("empty"));

  torch::jit::Module script("m");
  script.register_parameter("w", at::ones({2}), /*is_buffer=*/false);
  script.register_buffer("seen", at::zeros({}, at::kLong));
  EXPECT_EQ(keys_of(state_dict(script)), (std::vector<std::string>{"seen", "w"}));
  load_state_dict(script, {{"w", at::full({2}, 3)}, {"seen", at::scalar_tensor(4)}});
  EXPECT_EQ(script.attr("seen").toTensor().item<int64_t>(), 4);
  EXPECT_EQ(script.attr("w").toTensor()[1].item<float>(), 3);

  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Net inner;
    DistributedDataParallel model(inner);
    EXPECT_EQ(keys_of(state_dict(model)), kNames);
    EXPECT_EQ(keys_of(state_dict(
                  std::make_shared<DistributedDataParallel<torch::nn::LinearImpl>>(torch::nn::Linear(2, 1)))),
              (std::vector<std::string>{"bias", "weight"}));
    Net other;
    optim::SGD optimizer(model.parameters(), optim::SGDOptions(0.1).momentum(0.9));
    load_state_dict(model, state_dict(other));
    if (rank == 1) load_state_dict(model, state_dict(inner));
    EXPECT_EQ(get_optimizer_state_dict(model, optimizer).size(), 2U);
  });
}

TEST(ModelStateDict, LoadsInPlaceAndConverts) {
  Net from, to;
  from->to(at::kDouble);
  std::vector<const void*> memory;
  for (const auto& tensor : to->parameters()) memory.push_back(tensor.const_data_ptr());
  const auto keys = load_state_dict(to, state_dict(from));
  EXPECT_THAT(keys.missing_keys, IsEmpty());
  EXPECT_THAT(keys.unexpected_keys, IsEmpty());
  for (size_t i = 0; i < memory.size(); ++i) {
    const at::Tensor tensor = to->parameters()[i];
    EXPECT_EQ(tensor.const_data_ptr(), memory[i]);
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    EXPECT_TRUE(tensor.requires_grad());
    EXPECT_TRUE(at::equal(tensor, from->parameters()[i].to(at::kFloat)));
  }
}

TEST(ModelStateDict, AllThatIsWrongIsToldAtOnceAndNothingChanges) {
  Net net, other;
  const auto before = copied(state_dict(net));
  auto state = copied(state_dict(other));
  state.erase("first.bias");
  state.erase("norm.weight");
  state["third.weight"] = at::ones({1});
  state["second.weight"] = at::ones({2, 7});
  state["second.bias"] = "text";
  EXPECT_THAT(
      message_of<c10::Error>([&] { load_state_dict(net, state); }),
      HasSubstr("NetImpl:\n\tMissing key(s) in state_dict: \"first.bias\", \"norm.weight\". "
                "\n\tUnexpected key(s) in state_dict: \"third.weight\". "
                "\n\tsize mismatch for second.weight: copying a param with shape torch.Size([2, 7]) from "
                "checkpoint, "
                "the shape in current model is torch.Size([2, 6]).\n\tWhile copying the parameter named "
                "\"second.bias\", expected torch.Tensor or Tensor-like object from checkpoint but received "
                "String"));
  EXPECT_THAT(message_of<c10::Error>([&] { load_state_dict(net, state, {.strict = false}); }),
              AllOf(HasSubstr("size mismatch"), ::testing::Not(HasSubstr("Missing"))));
  expect_equal(state_dict(net), before);

  state.erase("second.weight"), state.erase("second.bias");
  const auto keys = load_state_dict(net, state, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("first.bias", "second.weight", "second.bias", "norm.weight"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("third.weight"));
  EXPECT_TRUE(at::equal(net->first->weight, other->first->weight));
  EXPECT_TRUE(at::equal(net->second->weight, before.at("second.weight").toTensor()));
}

TEST(ModelStateDict, NamesAreMapped) {
  Net net, other;
  StateDict state;
  for (const auto& [name, value] : copied(state_dict(other))) {
    state["module.backbone." + (name.starts_with("second") ? "head" + name.substr(6) : name)] = value;
  }
  state["module.extra"] = at::ones({1});
  const KeyMap drop = [](const std::string& key) {
    return key == "module.extra" ? std::nullopt : std::optional(key);
  };
  load_state_dict(
      net, state,
      {.key_map = {drop, strip_prefix("module."), replace_in_keys("^backbone\\.", ""),
                   rename_keys({{"head.weight", "second.weight"}, {"head.bias", "second.bias"}})}});
  expect_equal(state_dict(net), state_dict(other));
  EXPECT_THAT(message_of<c10::Error>([&] {
                load_state_dict(net, state_dict(other),
                                {.strict = false, .key_map = {replace_in_keys("second|first", "first")}});
              }),
              HasSubstr("\"first.weight\" and \"second.weight\" both become \"first.weight\" by key_map"));
  EXPECT_THAT(message_of<c10::ValueError>([] { replace_in_keys("(", ""); }),
              HasSubstr("no regular expression"));
}

}  // namespace
}  // namespace lockstep::model_state_dict_test

#include <any>
#include <gmock/gmock.h>
#include <list>
#include <map>
#include <unordered_map>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/base/tensor_tree.h>

namespace users {

/// A struct that says itself what it holds.
struct Output {
  torch::Tensor logits;
  std::vector<std::optional<torch::Tensor>> hidden;
  int steps = 0;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(logits), visit(hidden), visit(steps);
  }
};

/// A struct of another library, for which a function says it.
struct Foreign {
  torch::Tensor one;
  std::string name;
};
template <class Visitor>
void visit_tensors(Foreign& foreign, Visitor&& visit) {
  visit(foreign.one);
}

/// A tree.
struct Node {
  torch::Tensor value;
  std::vector<Node> children;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(value), visit(children);
  }
};

struct Opaque {
  std::string name;
  torch::Tensor hidden;
};
struct Declared;

}  // namespace users

namespace lockstep::tensor_tree_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using torch::Tensor;

Tensor t(double value) {
  return torch::full({2}, value);
}

/// The numbers that the tensors hold.
template <class T>
std::vector<double> found(T&& value) {
  std::vector<double> answer;
  for_each_tensor(value, [&](const Tensor& tensor) { answer.push_back(tensor[0].template item<double>()); });
  return answer;
}

/// The same after every tensor was replaced by ten times itself.
template <class T>
std::vector<double> found_after_replacing(T& value) {
  for_each_tensor(value, [](Tensor& tensor) { tensor = tensor * 10; });
  return found(value);
}

static_assert(can_find_tensors<Tensor> && can_find_tensors<const Tensor&> && can_find_tensors<void>);
static_assert(can_find_tensors<int> && can_find_tensors<std::string> && can_find_tensors<c10::Scalar>);
static_assert(can_find_tensors<std::tuple<std::vector<std::map<int, Tensor>>, const char*>>);
static_assert(can_find_tensors<c10::IValue> && can_find_tensors<c10::List<Tensor>>);
static_assert(can_find_tensors<users::Output> && can_find_tensors<std::vector<users::Foreign>>);
static_assert(can_find_tensors<users::Node>);
static_assert(!can_find_tensors<users::Opaque> && !can_find_tensors<std::vector<users::Opaque>>);
static_assert(!can_find_tensors<std::pair<int, std::shared_ptr<users::Opaque>>>);
static_assert(!can_find_tensors<std::any> && !can_find_tensors<void*> && !can_find_tensors<users::Declared*>);
static_assert(!can_find_tensors<std::variant<Tensor, users::Opaque>>);
static_assert(!can_find_tensors<torch::nn::AnyValue>);
static_assert(can_replace_tensors<std::pair<Tensor, const users::Opaque*>> &&
              can_replace_tensors<c10::IValue>);
static_assert(!can_replace_tensors<Tensor*> && !can_replace_tensors<std::optional<std::shared_ptr<Tensor>>>);
static_assert(!can_replace_tensors<at::TensorList> && !can_replace_tensors<std::reference_wrapper<Tensor>>);
static_assert(!can_replace_tensors<torch::nn::utils::rnn::PackedSequence>);
static_assert(!can_replace_tensors<std::tuple<Tensor, users::Opaque>>);

TEST(ForEachTensor, SearchesStandardTypes) {
  Tensor alone = t(1);
  EXPECT_THAT(found_after_replacing(alone), ElementsAre(10));
  std::tuple nest(t(1), std::pair(t(2), 3), std::vector{t(4), Tensor(), t(5)}, std::array{t(6)},
                  std::optional<Tensor>(t(7)), std::optional<Tensor>(), std::list<Tensor>{t(8)});
  EXPECT_THAT(found(nest), ElementsAre(1, 2, 4, 5, 6, 7, 8));
  EXPECT_THAT(found_after_replacing(nest), ElementsAre(10, 20, 40, 50, 60, 70, 80));
  EXPECT_FALSE(std::get<2>(nest)[1].defined());
  std::map<std::string, std::vector<Tensor>> map{{"b", {t(2)}}, {"a", {t(1), t(3)}}};
  EXPECT_THAT(found_after_replacing(map), ElementsAre(10, 30, 20));
  std::unordered_map<int, Tensor> hashed{{4, t(4)}};
  EXPECT_THAT(found_after_replacing(hashed), ElementsAre(40));
  std::variant<int, Tensor> variant = t(1);
  EXPECT_THAT(found_after_replacing(variant), ElementsAre(10));
  variant = 3;
  EXPECT_THAT(found(variant), IsEmpty());
  EXPECT_THAT(found(std::tuple(1, "text", std::string("text"), std::vector<bool>{true})), IsEmpty());
}

TEST(ForEachTensor, GivesConstTensorsOfConstValues) {
  const std::vector<Tensor> values{t(1), t(2)};
  int visits = 0;
  for_each_tensor(values, [&](auto& tensor) {
    static_assert(std::is_const_v<std::remove_reference_t<decltype(tensor)>>);
    ++visits;
  });
  EXPECT_EQ(visits, 2);
  for_each_tensor(values, [](Tensor& tensor) { tensor = Tensor(); });
  EXPECT_THAT(found(values), ElementsAre(1, 2));
}

TEST(ForEachTensor, FollowsPointersUnlessOnlyOwnedOnesAreAsked) {
  Tensor tensor = t(1);
  std::vector<Tensor> elements{t(5), t(6)};
  std::tuple pointers(&tensor, std::make_shared<Tensor>(t(2)), std::make_unique<Tensor>(t(3)),
                      std::ref(tensor), static_cast<Tensor*>(nullptr), at::TensorList(elements));
  EXPECT_THAT(found(pointers), ElementsAre(1, 2, 3, 1, 5, 6));
  int owned = 0;
  for_each_owned_tensor(pointers, [&](const Tensor&) { ++owned; });
  EXPECT_EQ(owned, 0);
  std::pair both(t(1), &tensor);
  for_each_owned_tensor(both, [&](Tensor& found) { found = t(9), ++owned; });
  EXPECT_EQ(owned, 1);
  EXPECT_THAT(found(both), ElementsAre(9, 1));
}

TEST(ForEachTensor, SearchesTorchsTypesAndLeavesSharedContainersAlone) {
  torch::OrderedDict<std::string, Tensor> ordered;
  ordered.insert("z", t(1)), ordered.insert("a", t(2));
  EXPECT_THAT(found_after_replacing(ordered), ElementsAre(10, 20));
  EXPECT_THAT(found(std::as_const(ordered)), ElementsAre(10, 20));

  c10::List<Tensor> list({t(1), t(2)});
  const auto same_list = list;
  EXPECT_THAT(found_after_replacing(list), ElementsAre(10, 20));
  EXPECT_THAT(found(same_list), ElementsAre(1, 2));
  c10::Dict<std::string, Tensor> dict;
  dict.insert("k", t(3));
  const auto same_dict = dict;
  EXPECT_THAT(found_after_replacing(dict), ElementsAre(30));
  EXPECT_THAT(found(same_dict), ElementsAre(3));

  auto packed = torch::nn::utils::rnn::pack_sequence({t(1), t(2)});
  const auto sizes = packed.batch_sizes();
  for_each_tensor(packed, [&](Tensor& tensor) {
    if (!tensor.is_same(sizes)) tensor = tensor * 10;
  });
  EXPECT_TRUE(torch::equal(packed.data(), torch::tensor({10.f, 20.f, 10.f, 20.f})));
}

TEST(ForEachTensor, SearchesIValues) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  dict.insert("k", t(3));
  const c10::List<Tensor> list({t(1), t(2)});
  c10::IValue value = c10::ivalue::Tuple::create(
      {list, dict, c10::ivalue::Tuple::create({t(4), c10::IValue(), 7}), c10::List<int64_t>({1}), "text"});
  EXPECT_THAT(found(std::as_const(value)), ElementsAre(1, 2, 3, 4));
  const c10::IValue before = value;
  EXPECT_THAT(found_after_replacing(value), ElementsAre(10, 20, 30, 40));
  EXPECT_THAT(found(before), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(value.toTupleRef().elements()[4].toStringRef(), "text");
  EXPECT_EQ(value.toTupleRef().elements()[2].toTupleRef().elements()[2].toInt(), 7);

  std::vector<c10::IValue> arguments{t(1), 2, value};
  EXPECT_THAT(found(arguments), ElementsAre(1, 10, 20, 30, 40));
}

TEST(ForEachTensor, GivesAnIValueItsOwnContainersEmptyOnesToo) {
  const c10::impl::GenericDict cache(c10::StringType::get(), c10::TensorType::get());
  c10::IValue value = c10::ivalue::Tuple::create({cache, c10::List<Tensor>()});
  EXPECT_THAT(found_after_replacing(value), ElementsAre());
  value.toTupleRef().elements()[0].toGenericDict().insert("k", t(3));
  EXPECT_EQ(cache.size(), 0);
}

TEST(ForEachTensor, SearchesWhatScriptReturns) {
  torch::jit::Module module("Named");
  module.define(R"(
    def forward(self, x: Tensor, n: int):
      if n > 0:
        return [(x, n), (x + 1, n)], {"more": [x + 2]}, x.size()
      return [(x, n)], {"more": [x]}, x.size()
  )");
  auto output = module.forward({t(1), 1});
  EXPECT_THAT(found_after_replacing(output), ElementsAre(10, 20, 30));
}

TEST(ForEachTensor, SearchesObjectsThatHoldThemselvesOnce) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  const auto type = c10::ClassType::create("Loop", unit);
  type->addAttribute("value", c10::TensorType::get());
  type->addAttribute("self", c10::AnyType::get());
  const auto object = c10::ivalue::Object::create(c10::StrongTypePtr(unit, type), 2);
  object->setSlot(0, t(1));
  object->setSlot(1, object);
  c10::IValue value = object;
  EXPECT_THAT(found_after_replacing(value), ElementsAre(10));
  for_each_owned_tensor(value, [](Tensor& tensor) { tensor = t(7); });
  EXPECT_THAT(found(value), ElementsAre(10));
  object->setSlot(1, c10::IValue());
}

TEST(ForEachTensor, AsksTheUsersTypes) {
  users::Output output{t(1), {t(2), std::nullopt, t(3)}, 4};
  EXPECT_THAT(found(output), ElementsAre(1, 2, 3));
  EXPECT_THAT(found(std::as_const(output)), ElementsAre(1, 2, 3));
  std::vector<users::Foreign> foreign{{t(1), "a"}, {t(2), "b"}};
  EXPECT_THAT(found_after_replacing(foreign), ElementsAre(10, 20));
  EXPECT_THAT(found(std::as_const(foreign)), ElementsAre(10, 20));
  users::Node tree{t(1), {{t(2), {}}, {t(3), {{t(4), {}}}}}};
  EXPECT_THAT(found_after_replacing(tree), ElementsAre(10, 20, 30, 40));
}

}  // namespace
}  // namespace lockstep::tensor_tree_test

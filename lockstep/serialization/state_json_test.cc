#include <cstdint>
#include <gmock/gmock.h>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <lockstep/base/errors.h>
#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/state_json.h>
#include <lockstep/serialization/testing/values.h>
#include <lockstep/testing/memory_bound.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::state_json_test {
namespace {

using testing::dict_of;
using ::testing::HasSubstr;
using testing::MemoryBound;
using testing::message_of;
using testing::same;

TEST(StateJson, UnionsOfRanks) {
  using serialization::encode_state;
  using serialization::merge_states;
  const auto encoded = [](const StateDict& state) { return encode_state(state, "state").json; };
  const auto decoded = [](const std::string& json) {
    return serialization::decode_state(
        json, [](const std::string&, const std::string&) { return at::ones({1}); }, "state.json");
  };
  const StateDict first = {
      {"a", to_object(StateDict{{"x", 1}, {"list", to_object(std::vector<int64_t>{1})}})},
      {"b", dict_of<int64_t>({{0, 10}, {2, to_object(StateDict{{"p", 1}})}})},
      {"c", serialization::make_object_dict()}};
  const StateDict second = {
      {"a", to_object(StateDict{{"x", 2}, {"y", 3}, {"list", to_object(std::vector<int64_t>{2, 3})}})},
      {"b", dict_of<int64_t>({{1, 11}, {2, to_object(StateDict{{"q", 2}})}})},
      {"c", dict_of<int64_t>({{5, 5}})},
      {"d", 4}};
  const StateDict both = {
      {"a", to_object(StateDict{{"x", 1}, {"y", 3}, {"list", to_object(std::vector<int64_t>{1})}})},
      {"b", dict_of<int64_t>({{0, 10}, {1, 11}, {2, to_object(StateDict{{"p", 1}, {"q", 2}})}})},
      {"c", dict_of<int64_t>({{5, 5}})},
      {"d", 4}};
  EXPECT_TRUE(same(decoded(merge_states({encoded(first), encoded(second)})), both));
  EXPECT_EQ(merge_states({encoded(first), encoded(first)}), encoded(first));
  EXPECT_THAT(
      message_of<c10::ValueError>([&] {
        merge_states(
            {encoded({{"m", to_object(StateDict{{"a.b", at::ones({1})}})}}),
             encoded({{"m", to_object(StateDict{{"a", to_object(StateDict{{"b", at::ones({1})}})}})}})});
      }),
      HasSubstr("'a.b'"));
}

StateDict without_tensors(const std::string& json) {
  return serialization::decode_state(
      json, [](const std::string&, const std::string&) { return at::Tensor(); }, "state.json");
}

TEST(StateJson, RefusesKeysThatWouldFillTheMemory) {
  std::string colliding, nans;
  // The inverse of c10's multiplier: all keys belong to one place of the dict's table.
  for (uint64_t i = 0; i < 64; ++i) {
    const auto key = static_cast<int64_t>(i * 0xf1de83e19937733dULL);
    colliding += (i == 0 ? "[" : ",[") + std::to_string(key) + ",0]";
  }
  for (int i = 0; i < 40; ++i) nans += std::string(i == 0 ? "" : ",") + R"([{"$float":"nan"},0])";
  MemoryBound bound(256 << 20);
  for (const std::string& pairs : {colliding, nans}) {
    EXPECT_THAT(
        message_of<CheckpointError>([&] { without_tensors(R"({"part":{"$dict":[)" + pairs + "]}}"); }),
        HasSubstr("a dict whose keys collide, which would take unreasonable memory, at ['part']"));
  }
  auto dict = serialization::make_object_dict();
  for (int i = 0; i < 10; ++i) dict.insert(std::nan(""), i);
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                serialization::encode_state({{"part", dict}}, "state");
              }),
              HasSubstr("state['part'] is a dict whose keys collide"));
}

TEST(StateJson, ManySmallDictsTakeTheirSpace) {
  const auto text_of = [](int dicts) {
    std::string text = "{\"part\":[0";
    for (int i = 0; i < dicts; ++i) text += ",{}";
    return text + "]}";
  };
  // As older versions have written it, without spaces at the end.
  EXPECT_EQ(without_tensors(text_of(100'000)).at("part").toListRef().size(), 100'001U);
  EXPECT_THAT(message_of<CheckpointError>([&] { without_tensors(text_of(1'700'000)); }),
              HasSubstr("state.json is damaged: it has more dicts than 5100012 bytes"));
  // What is written has them. Braces count in strings, too.
  const std::string braces(1'700'000, '{');
  const std::string one = serialization::encode_state({{"one", braces}}, "state").json;
  const std::string two = serialization::encode_state({{"two", braces}}, "state").json;
  for (const std::string& text : {one, serialization::merge_states({one, two})}) {
    EXPECT_EQ(without_tensors(text).at("one").toStringRef(), braces);
  }
}

TEST(StateJson, RefusesWhatIsNeverWritten) {
  const auto refused = [](const std::string& json) {
    return message_of<CheckpointError>([&] {
      serialization::decode_state(
          json, [](const std::string&, const std::string&) { return at::ones({1}); }, "state.json");
    });
  };
  EXPECT_THAT(refused("[]"), HasSubstr("no object"));
  EXPECT_THAT(refused("1"), HasSubstr("no object"));
  EXPECT_THAT(refused("{\"a\":"), HasSubstr("no JSON, at its byte"));
  EXPECT_THAT(refused("{\"a\":1,\"a\":1}"), HasSubstr("twice"));
  EXPECT_THAT(refused("{\"a\":{\"b\":1,\"b\":1}}"), HasSubstr("twice, at ['a']"));
  EXPECT_THAT(refused("{\"a\":18446744073709551615}"), HasSubstr("64 bits"));
  EXPECT_THAT(refused("{\"a\":1e999}"), HasSubstr("state.json"));
  EXPECT_THAT(refused("{\"a\":[{\"$what\":1}]}"),
              HasSubstr("'$what' is unknown, or has a value of a wrong kind, at ['a'][0]"));
  EXPECT_THAT(refused(R"({"a":{"$float":"0.5"}})"), HasSubstr("$float"));
  EXPECT_THAT(refused(R"({"a":{"$float":"nan:0"}})"), HasSubstr("$float"));
  EXPECT_THAT(refused(R"({"a":{"$bytes":"f"}})"), HasSubstr("odd"));
  EXPECT_THAT(refused(R"({"a":{"$bytes":"-1"}})"), HasSubstr("digits"));
  EXPECT_THAT(refused(R"({"a":{"$device":"moon:9999999999999999999999"}})"), HasSubstr("no device"));
  for (const char* index :
       {"128", "255", "256", "300", "4294926", "9999999999999999999999"}) {  // 127 is torch's last
    EXPECT_THAT(refused(R"({"a":{"$device":"cuda:)" + std::string(index) + R"("}})"), HasSubstr("no device"));
  }
  EXPECT_THAT(refused(R"({"a":{"$complex":[1,2]}})"), HasSubstr("complex"));
  EXPECT_THAT(refused(R"({"a":{"$dict":[[1]]}})"), HasSubstr("pair"));
  EXPECT_THAT(refused(R"({"a":{"$dict":[[[],1]]}})"), HasSubstr("wrong kind"));
  EXPECT_THAT(refused(R"({"a":{"$tuple":1}})"), HasSubstr("wrong kind"));
  EXPECT_THAT(refused(R"({"a":{"$tensor":1}})"), HasSubstr("no name"));
  EXPECT_THAT(refused(R"({"a":{"$x":1,"b":2}})"), HasSubstr("begins with '$'"));
  EXPECT_THAT(refused("{\"a\":" + std::string(100'000, '[')), HasSubstr("too deep"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(refused(objects), HasSubstr("too deep"));
}

}  // namespace
}  // namespace lockstep::state_json_test

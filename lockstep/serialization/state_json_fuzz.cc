// Any bytes as a state: values that can be written and read again, or a CheckpointError.
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/ops/zeros.h>

#include <lockstep/base/errors.h>
#include <lockstep/serialization/state_json.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::state_json_fuzz {
namespace {

std::vector<std::string> seeds() {
  return {
      R"({"model": {"fc1.weight":{"$tensor":"fc1.weight"},"x":{"$tensor":null}}, "n": [1,-2.5,true,null,"text"]})",
      R"({"a": {"$dict":[[1,{"$tuple":[1,"two"]}],[0.5,{"$complex":[1.0,{"$float":"-inf"}]}],["$k",{}]]}})",
      R"({"d": {"$device":"cuda:1"}, "b": {"$bytes":"ff00"}, "f": {"$float":"nan:7ff8000000000001"}})"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(state_json, seeds) {
  static const at::Tensor tensor = at::zeros({1});
  const auto find = [](const std::string&, const std::string&) { return tensor; };
  StateDict state;
  try {
    state = serialization::decode_state({reinterpret_cast<const char*>(data), size}, find, "input");
  } catch (const CheckpointError&) {
    return 0;
  }
  std::string text;
  try {
    text = serialization::encode_state(state, "state").json;
  } catch (const c10::ValueError&) {  // nested deeper than is written, or parts called "$…"
    return 0;
  }
  const StateDict again = serialization::decode_state(text, find, "again");
  if (serialization::encode_state(again, "state").json != text) std::abort();
  if (serialization::merge_states({text, text + " "}).empty()) std::abort();
  return 0;
}

}  // namespace lockstep::state_json_fuzz

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/serialization/parse_device.h>
#include <lockstep/serialization/pickle/dict.h>
#include <lockstep/serialization/safetensors_header.h>
#include <lockstep/serialization/state_json.h>

namespace lockstep::serialization {
namespace {

using nlohmann::json;

// A dict with other keys is three levels of JSON.
constexpr size_t kMaxJsonDepth = 3 * (kMaxStateDepth + 2);

// c10's dict of one item takes 750 bytes, and its text 6. Up to 1 GiB of them any text may have: older
// versions wrote no spaces at the end.
constexpr size_t kTextOfDict = 24;
constexpr size_t kFreeDicts = (size_t{1} << 30) / 750;

/// How many bytes a state's text has at least, for the "{" that it has.
size_t least_size(std::string_view text) {
  const auto dicts = static_cast<size_t>(std::count(text.begin(), text.end(), '{'));
  return (dicts - std::min(dicts, kFreeDicts)) * kTextOfDict;
}

std::string with_spaces_for_dicts(std::string text) {
  text.resize(std::max(text.size(), least_size(text)), ' ');
  return text;
}

/// The JSON string; nothing if it is not UTF-8.
std::optional<std::string> json_string(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    return {};
  }
}

std::string float_to_json(double value) {
  if (std::isfinite(value)) return json(value).dump();  // the shortest that is the same again
  std::string name = value > 0 ? "inf" : "-inf";
  if (std::isnan(value)) {
    name = "nan";
    const auto bits = std::bit_cast<uint64_t>(value);
    if (bits != std::bit_cast<uint64_t>(std::numeric_limits<double>::quiet_NaN())) {
      std::array<char, 16> hex{};
      const auto end = std::to_chars(hex.data(), hex.data() + hex.size(), bits, 16).ptr;
      name += ":" + std::string(hex.data(), end);
    }
  }
  return R"({"$float":")" + name + "\"}";
}

std::optional<double> float_of_name(const std::string& name) {
  if (name == "inf") return std::numeric_limits<double>::infinity();
  if (name == "-inf") return -std::numeric_limits<double>::infinity();
  if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (!name.starts_with("nan:")) return {};
  uint64_t bits = 0;
  const auto [end, error] = std::from_chars(name.data() + 4, name.data() + name.size(), bits, 16);
  const auto value = std::bit_cast<double>(bits);
  if (error != std::errc() || end != name.data() + name.size() || !std::isnan(value)) return {};
  return value;
}

class Encoder {
 public:
  Encoder(std::string owner, std::string part) : owner_(std::move(owner)), fixed_part_(std::move(part)) {}

  EncodedState encode(const StateDict& state) {
    out_ = "{";
    for (const char* separator = "\n"; const auto& [key, value] : state) {
      TORCH_CHECK_VALUE(!key.starts_with('$'), owner_, ": a part can't be called '", printable(key),
                        "', for '$' marks what JSON does not have");
      const auto name = json_string(key);
      TORCH_CHECK_VALUE(name, owner_, ": the name of a part, '", printable(key), "', is not UTF-8");
      part_ = fixed_part_.empty() ? key : fixed_part_;
      path_ = fixed_part_.empty() ? std::vector<std::string>{} : std::vector{key};
      place_ = owner_ + "['" + printable(key) + "']";
      out_ += separator + *name + ": ";
      add(value, 1);
      separator = ",\n";
    }
    out_ += "\n}\n";
    return {with_spaces_for_dicts(std::move(out_)), std::move(tensors_)};
  }

 private:
  void add(const c10::IValue& value, int depth) {
    TORCH_CHECK_VALUE(depth <= kMaxStateDepth, place_, " is nested deeper than ", kMaxStateDepth,
                      " levels, or contains itself");
    if (value.isNone()) {
      out_ += "null";
    } else if (value.isBool()) {
      out_ += value.toBool() ? "true" : "false";
    } else if (value.isInt()) {
      out_ += std::to_string(value.toInt());
    } else if (value.isDouble()) {
      out_ += float_to_json(value.toDouble());
    } else if (value.isString()) {
      add_string(value.toStringRef());
    } else if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isComplexDouble()) {
      const c10::complex<double> number = value.toComplexDouble();
      out_ += R"({"$complex":[)" + float_to_json(number.real()) + "," + float_to_json(number.imag()) + "]}";
    } else if (value.isDevice()) {
      out_ += R"({"$device":")" + value.toDevice().str() + "\"}";
    } else if (value.isTuple()) {
      out_ += R"({"$tuple":)";
      add_list(value.toTupleRef().elements().vec(), depth);
      out_ += "}";
    } else if (value.isList()) {
      add_list(value.toListRef().vec(), depth);
    } else if (value.isGenericDict()) {
      add_dict(value.toGenericDict(), depth);
    } else {
      TORCH_CHECK_VALUE(
          false, place_, " is of the kind ", value.tagKind(),
          ", which a checkpoint can't hold; known are None, bool, int, double, complex, string, "
          "device, tensor, and lists, tuples and dicts of them");
    }
  }

  void add_string(const std::string& text) {
    const auto json = json_string(text);
    out_ += json ? *json : R"({"$bytes":")" + to_hex(text) + "\"}";
  }

  void add_list(const std::vector<c10::IValue>& elements, int depth) {
    out_ += "[";
    for (size_t i = 0; i < elements.size(); ++i) {
      if (i > 0) out_ += ",";
      within(std::to_string(i), "[" + std::to_string(i) + "]", [&] { add(elements[i], depth + 1); });
    }
    out_ += "]";
  }

  void add_dict(const c10::impl::GenericDict& dict, int depth) {
    bool plain = true;
    std::vector<c10::IValue> keys_and_values;
    for (const auto& item : dict) {
      const c10::IValue& key = item.key();
      TORCH_CHECK_VALUE(key.isString() || key.isInt() || key.isBool() || key.isDouble(), place_,
                        " has a key of the kind ", key.tagKind(), "; known are string, int, bool and double");
      plain =
          plain && key.isString() && !key.toStringRef().starts_with('$') && json_string(key.toStringRef());
      keys_and_values.push_back(key);
      keys_and_values.emplace_back();
    }
    const size_t tensors_before = tensors_.size();
    const char* problem = pickle::find_key_problem(keys_and_values);
    TORCH_CHECK_VALUE(!problem, place_, " is ", problem);
    out_ += plain ? "{" : R"({"$dict":[)";
    const char* separator = "";
    for (const auto& item : dict) {
      const c10::IValue& key = item.key();
      std::string name;
      std::string shown;
      if (key.isString()) {
        name = json_string(key.toStringRef()) ? key.toStringRef() : to_hex(key.toStringRef());
        shown = "'" + printable(key.toStringRef()) + "'";
      } else {
        name = key.isInt()    ? std::to_string(key.toInt())
               : key.isBool() ? (key.toBool() ? "true" : "false")
                              : json(key.toDouble()).dump();
        shown = name;
      }
      out_ += separator;
      if (plain) {
        add_string(key.toStringRef());
        out_ += ":";
      } else {
        out_ += "[";
        add(key, depth + 1);
        out_ += ",";
      }
      within(name, "[" + shown + "]", [&] { add(item.value(), depth + 1); });
      if (!plain) out_ += "]";
      separator = ",";
    }
    out_ += plain ? "}" : "]}";
    if (tensors_.size() == tensors_before + 1) tensors_.back().part_of = tensor_part_of(dict);
  }

  void add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      out_ += R"({"$tensor":null})";
      return;
    }
    check_can_write(tensor, place_);
    std::string name;
    for (const std::string& word : path_) name += (name.empty() ? "" : ".") + word;
    if (name.empty()) name = part_;
    auto& taken = names_[part_];
    taken.insert("__metadata__");
    std::string free = name;
    for (int64_t i = 2; !taken.insert(free).second; ++i) free = name + "#" + std::to_string(i);
    out_ += R"({"$tensor":)" + json_string(free).value() + "}";
    tensors_.push_back({.part = part_, .name = free, .tensor = tensor});
  }

  template <class Action>
  void within(const std::string& name, const std::string& shown, const Action& action) {
    const size_t length = place_.size();
    place_ += shown;
    path_.push_back(name);
    action();
    path_.pop_back();
    place_.resize(length);
  }

  std::string owner_;
  std::string fixed_part_;
  std::string out_;
  std::string part_;
  std::vector<std::string> path_;
  std::string place_;
  std::map<std::string, std::set<std::string>> names_;
  std::vector<StateTensor> tensors_;
};

// --- union

/// The payload of {"$dict": […]}, or null.
json* pairs_of(json& value) {
  if (!value.is_object() || value.size() != 1) return nullptr;
  const auto found = value.find("$dict");
  return found == value.end() ? nullptr : &*found;
}

bool is_plain_dict(const json& value) {
  return value.is_object() && !(value.size() == 1 && value.begin().key().starts_with('$'));
}

void merge_into(json& into, json& other) {
  if (is_plain_dict(into) && is_plain_dict(other)) {
    for (auto& [key, value] : other.items()) {
      const auto found = into.find(key);
      if (found == into.end()) {
        into[key] = std::move(value);
      } else {
        merge_into(*found, value);
      }
    }
  } else if (json* pairs = pairs_of(into)) {
    json* others = pairs_of(other);
    if (others == nullptr) return;
    std::map<std::string, size_t> places;
    for (size_t i = 0; i < pairs->size(); ++i) places.emplace((*pairs)[i][0].dump(), i);
    for (json& pair : *others) {
      const auto found = places.find(pair[0].dump());
      if (found == places.end()) {
        pairs->push_back(std::move(pair));
      } else {
        merge_into((*pairs)[found->second][1], pair[1]);
      }
    }
  }
  // An empty dict does not show of which kind its keys are.
  if (into.is_object() && into.empty() && pairs_of(other)) into = std::move(other);
}

void check_tensor_names(const json& value, std::set<std::string>& names, const std::string& part) {
  if (value.is_object() && value.size() == 1 && value.begin().key() == "$tensor") {
    if (value.begin()->is_null()) return;
    const auto& name = value.begin()->get_ref<const std::string&>();
    TORCH_CHECK_VALUE(names.insert(name).second, "the state's part '", printable(part),
                      "' has on different ranks different tensors that both get the name '", printable(name),
                      "' in the file; let their keys differ in more than where a dot stands");
  } else if (value.is_structured()) {
    for (const auto& element : value) check_tensor_names(element, names, part);
  }
}

// --- reading

/// Builds values from the events of a JSON reader.
class Decoder : public nlohmann::json_sax<json> {
 public:
  Decoder(const TensorSource& tensors, const std::string& what, const std::string& part)
      : tensors_(tensors), what_(what), part_(part) {}

  StateDict take() { return std::move(result_); }

  bool null() override { return put({}); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override {
    check(value <= static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max()),
          "a whole number does not fit into 64 bits with sign");
    return put(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { fail("binary data"); }

  bool start_object(size_t) override { return open(true); }
  bool start_array(size_t) override {
    check(!stack_.empty(), "the state is no object");
    return open(false);
  }
  bool key(string_t& name) override {
    stack_.back().key = std::move(name);
    return true;
  }

  bool end_array() override {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    return put(list_of(std::move(frame.values)));
  }

  bool end_object() override {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    if (stack_.empty()) {
      for (size_t i = 0; i < frame.values.size(); i += 2) {
        check(result_.emplace(frame.values[i].toStringRef(), std::move(frame.values[i + 1])).second,
              "a part is there twice");
      }
      return true;
    }
    const auto is_tag = [&](size_t i) { return frame.values[i].toStringView().starts_with('$'); };
    if (frame.values.size() == 2 && is_tag(0)) {
      return put(tagged(frame.values[0].toStringRef(), frame.values[1]));
    }
    for (size_t i = 0; i < frame.values.size(); i += 2) check(!is_tag(i), "a key begins with '$'");
    return put(dict_of(std::move(frame.values)));
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    LOCKSTEP_CHECK_FILE(false, what_, " is no JSON, at its byte ", position, ": ", printable(error.what()));
  }

 private:
  /// An object or list under construction.
  struct Frame {
    bool object = false;
    std::string key;
    std::vector<c10::IValue> values;  // of an object: keys and values in turn
  };

  [[noreturn]] void fail(const std::string& problem) const {
    std::string place;
    for (const Frame& frame : stack_) {
      place +=
          frame.object ? "['" + printable(frame.key) + "']" : "[" + std::to_string(frame.values.size()) + "]";
      if (place.size() > 500) break;
    }
    LOCKSTEP_CHECK_FILE(false, what_, " is damaged: ", problem, place.empty() ? "" : ", at ", place);
  }
  void check(bool condition, const char* problem) const {
    if (!condition) fail(problem);
  }

  bool open(bool object) {
    check(stack_.size() < kMaxJsonDepth, "it is nested too deep");
    stack_.push_back({object, {}, {}});
    return true;
  }

  bool put(c10::IValue value) {
    check(!stack_.empty(), "the state is no object");
    Frame& frame = stack_.back();
    if (frame.object) frame.values.emplace_back(frame.key);
    frame.values.push_back(std::move(value));
    return true;
  }

  static c10::IValue list_of(std::vector<c10::IValue> values) {
    auto list = serialization::make_object_list(values.size());
    for (c10::IValue& value : values) list.push_back(std::move(value));
    return list;
  }

  c10::IValue dict_of(std::vector<c10::IValue> keys_and_values) const {
    auto dict = serialization::make_object_dict();
    if (const char* problem = pickle::fill_dict(dict, std::move(keys_and_values))) fail(problem);
    return dict;
  }

  c10::IValue tagged(const std::string& tag, const c10::IValue& value) const {
    if (tag == "$tensor") return tensor(value);
    if (tag == "$tuple" && value.isList()) return c10::ivalue::Tuple::create(value.toListRef().vec());
    if (tag == "$dict" && value.isList()) {
      std::vector<c10::IValue> keys_and_values;
      for (const c10::IValue& pair : value.toListRef()) {
        check(pair.isList() && pair.toListRef().size() == 2, "an element of a dict is no pair");
        const c10::IValue& key = pair.toListRef()[0];
        check(key.isString() || key.isInt() || key.isBool() || key.isDouble(),
              "a dict has a key of a wrong kind");
        keys_and_values.push_back(key);
        keys_and_values.push_back(pair.toListRef()[1]);
      }
      return dict_of(std::move(keys_and_values));
    }
    if (tag == "$complex" && value.isList() && value.toListRef().size() == 2) {
      const auto parts = value.toListRef();
      check(parts[0].isDouble() && parts[1].isDouble(), "a complex number has parts that are no numbers");
      return c10::complex<double>(parts[0].toDouble(), parts[1].toDouble());
    }
    if (tag == "$float" && value.isString()) {
      const auto number = float_of_name(value.toStringRef());
      check(number.has_value(), "'$float' is neither nan nor inf");
      return *number;
    }
    if (tag == "$bytes" && value.isString()) return bytes(value.toStringRef());
    if (tag == "$device" && value.isString()) return device(value.toStringRef());
    fail("'" + printable(tag) + "' is unknown, or has a value of a wrong kind");
  }

  std::string bytes(const std::string& hex) const {
    check(hex.size() % 2 == 0, "'$bytes' has an odd number of digits");
    const auto bytes = from_hex(hex);
    check(bytes.has_value(), "'$bytes' has something else than digits");
    return *bytes;
  }

  c10::IValue device(const std::string& name) const {
    const auto device = parse_device(name);
    if (!device) fail("'" + printable(name) + "' is no device");
    return *device;
  }

  c10::IValue tensor(const c10::IValue& name) const {
    if (name.isNone()) return at::Tensor();
    check(name.isString(), "'$tensor' is no name");
    // The frame of the whole state stands at the part.
    return tensors_(part_.empty() ? stack_.front().key : part_, name.toStringRef());
  }

  const TensorSource& tensors_;
  const std::string& what_;
  const std::string& part_;
  std::vector<Frame> stack_;
  StateDict result_;
};

}  // namespace

EncodedState encode_state(const StateDict& state, const std::string& owner, const std::string& part) {
  return Encoder(owner, part).encode(state);
}

std::string merge_states(const std::vector<std::string>& states) {
  bool same = true;
  for (const std::string& state : states) same = same && state == states.front();
  if (same) return states.front();
  json merged = json::parse(states.front());
  for (size_t i = 1; i < states.size(); ++i) {
    json other = json::parse(states[i]);
    merge_into(merged, other);
  }
  for (const auto& [part, value] : merged.items()) {
    std::set<std::string> names;
    check_tensor_names(value, names, part);
  }
  return with_spaces_for_dicts(merged.dump() + "\n");
}

StateDict decode_state(std::string_view text, const TensorSource& tensors, const std::string& what,
                       const std::string& part) {
  LOCKSTEP_CHECK_FILE(text.size() >= least_size(text), what, " is damaged: it has more dicts than ",
                      text.size(), " bytes, with spaces at its end, stand for");
  Decoder decoder(tensors, what, part);
  json::sax_parse(text.begin(), text.end(), &decoder);
  return decoder.take();
}

}  // namespace lockstep::serialization

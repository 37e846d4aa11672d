#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/serialization/safetensors_header.h>

namespace lockstep::serialization {
namespace {

constexpr size_t kMaxDimensions = 64;  // what ATen's operations can iterate over
constexpr const char* kMetadata = "__metadata__";

constexpr std::array<std::pair<const char*, at::ScalarType>, 20> kDtypes = {{
    {"BOOL", at::kBool},
    {"F4", at::ScalarType::Float4_e2m1fn_x2},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E8M0", at::ScalarType::Float8_e8m0fnu},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"C64", at::kComplexFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
}};

/// Shapes in the file count F4 elements, of which torch's dtype holds two.
bool is_packed(at::ScalarType dtype) {
  return dtype == at::ScalarType::Float4_e2m1fn_x2;
}

/// Takes the events of a JSON reader and lets through only what a header may hold, so that neither depth nor
/// values that are not wanted cost anything.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(int64_t data_bytes, const std::string& what) : data_bytes_(data_bytes), what_(what) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override {
    if (place_ == Place::kFile && key_ == kMetadata) return true;
    unexpected("null");
  }
  bool boolean(bool) override { unexpected("true or false"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    unexpected("a number that is not whole or has more than 64 bits");
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) unexpected("a number");
    LOCKSTEP_CHECK_FILE(value <= static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max()), what_,
                        ": ", where(), " has the number ", value, ", which does not fit into 63 bits");
    auto& numbers = place_ == Place::kShape ? shape_ : offsets_;
    LOCKSTEP_CHECK_FILE(
        numbers.size() < (place_ == Place::kShape ? kMaxDimensions : 2), what_, ": ", where(),
        place_ == Place::kShape ? " has more than 64 dimensions" : " has more than 2 offsets");
    numbers.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      LOCKSTEP_CHECK_FILE(header_.metadata.emplace(key_, value).second, what_, ": the metadata have '",
                          printable(key_), "' twice");
    } else if (place_ == Place::kTensor && field_ == kDtype) {
      const auto dtype = torch_dtype(value);
      LOCKSTEP_CHECK_FILE(dtype || value == "F6_E2M3" || value == "F6_E3M2", what_, ": ", where(),
                          " has the unknown dtype '", printable(value), "'");
      LOCKSTEP_CHECK_FILE(dtype, what_, ": ", where(), " has the dtype '", value,
                          "', which torch does not have");
      dtype_ = *dtype;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kFile;
    } else if (place_ == Place::kFile) {
      place_ = key_ == kMetadata ? Place::kMetadata : Place::kTensor;
      seen_ = 0;
      shape_.clear();
      offsets_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::kFile) {
      LOCKSTEP_CHECK_FILE(names_.insert(name).second, what_, ": the name '", printable(name),
                          "' is there twice");
      key_ = name;
    } else if (place_ == Place::kMetadata) {
      key_ = name;
    } else {
      field_ = name == "dtype" ? kDtype : name == "shape" ? kShape : name == "data_offsets" ? kOffsets : 0;
      LOCKSTEP_CHECK_FILE(field_ != 0, what_, ": ", where(), " has the unknown field '", printable(name),
                          "'");
      LOCKSTEP_CHECK_FILE((seen_ & field_) == 0, what_, ": ", where(), " has the field '", name, "' twice");
      seen_ |= field_;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) add_tensor();
    place_ = place_ == Place::kFile ? Place::kOutside : Place::kFile;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == kDtype) unexpected("a list");
    place_ = field_ == kShape ? Place::kShape : Place::kOffsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    LOCKSTEP_CHECK_FILE(false, what_, ": the header is no JSON, at its byte ", position, ": ",
                        printable(error.what()));
  }

 private:
  enum class Place { kOutside, kFile, kMetadata, kTensor, kShape, kOffsets };
  enum Field { kDtype = 1, kShape = 2, kOffsets = 4 };

  std::string where() const {
    if (place_ == Place::kOutside) return "the header";
    if (place_ == Place::kMetadata || key_ == kMetadata)
      return "the metadata entry '" + printable(key_) + "'";
    return "tensor '" + printable(key_) + "'";
  }

  [[noreturn]] void unexpected(const char* got) const {
    LOCKSTEP_CHECK_FILE(false, what_, ": ", where(), " has ", got, " where the format wants ",
                        place_ == Place::kOutside    ? "an object"
                        : place_ == Place::kFile     ? "an object"
                        : place_ == Place::kMetadata ? "a string"
                        : place_ != Place::kTensor   ? "a whole number"
                        : field_ == kDtype           ? "a string"
                                                     : "a list");
  }

  void add_tensor() {
    for (const auto& [field, name] :
         {std::pair{kDtype, "dtype"}, {kShape, "shape"}, {kOffsets, "data_offsets"}}) {
      LOCKSTEP_CHECK_FILE((seen_ & field) != 0, what_, ": ", where(), " has no '", name, "'");
    }
    LOCKSTEP_CHECK_FILE(offsets_.size() == 2, what_, ": ", where(), " has ", offsets_.size(),
                        " offsets instead of 2");
    const auto [begin, end] = std::pair(offsets_[0], offsets_[1]);
    LOCKSTEP_CHECK_FILE(begin <= end, what_, ": ", where(), " ends at byte ", end, ", before its begin ",
                        begin);
    LOCKSTEP_CHECK_FILE(end <= data_bytes_, what_, ": ", where(), " ends at byte ", end,
                        " of the data, of which the file has ", data_bytes_);
    if (is_packed(dtype_)) {
      LOCKSTEP_CHECK_FILE(!shape_.empty() && shape_.back() % 2 == 0, what_, ": ", where(),
                          " has F4 elements, two to a byte, and a last dimension that is not even");
      shape_.back() /= 2;
    }
    const auto bytes = bytes_of(shape_, dtype_);
    LOCKSTEP_CHECK_FILE(bytes, what_, ": ", where(), " has a shape whose product overflows");
    LOCKSTEP_CHECK_FILE(*bytes == end - begin, what_, ": ", where(), " needs ", *bytes,
                        " bytes for its shape and dtype, and has ", end - begin);
    header_.tensors.push_back({key_, dtype_, shape_, begin, end});
  }

  const int64_t data_bytes_;
  const std::string& what_;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  Place place_ = Place::kOutside;
  std::string key_;
  int field_ = 0;
  int seen_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  std::vector<int64_t> shape_;
  std::vector<int64_t> offsets_;
};

}  // namespace

std::optional<std::string> safetensors_dtype(at::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return name;
  }
  return {};
}

std::optional<at::ScalarType> torch_dtype(std::string_view name) {
  for (const auto& [known, type] : kDtypes) {
    if (name == known) return type;
  }
  return {};
}

void check_can_write(const at::Tensor& tensor, const std::string& what) {
  TORCH_CHECK_VALUE(tensor.defined(), what, " is undefined, so there is nothing to write");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, " has the layout ", tensor.layout(),
                    ", and a safetensors file holds dense tensors; convert it with to_dense()");
  TORCH_CHECK_VALUE(!tensor.is_meta(), what, " is on the device meta, where it has no elements");
  TORCH_CHECK_VALUE(safetensors_dtype(tensor.scalar_type()), what, " has the dtype ", tensor.scalar_type(),
                    ", which safetensors does not have; convert it (to complex64, say), or save parts of it");
}

std::optional<int64_t> bytes_of(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool empty = false;
  for (const int64_t size : shape) {
    empty = empty || size == 0;
    // As if a size of zero were one: torch computes strides, which overflow with the other sizes.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return {};
  }
  return empty ? 0 : bytes;
}

int64_t lay_out(std::vector<SafetensorsEntry>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    const auto size_a = c10::elementSize(a.dtype);
    const auto size_b = c10::elementSize(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  int64_t at = 0;
  for (SafetensorsEntry& tensor : tensors) {
    tensor.begin = at;
    at += bytes_of(tensor.shape, tensor.dtype).value();
    tensor.end = at;
  }
  return at;
}

std::string make_safetensors_header(const SafetensorsHeader& header) {
  // Text, not a tree: a tree of 100,000 tensors in their order would be slow to make.
  const auto quoted = [](const std::string& text) {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::type_error&) {
      TORCH_CHECK_VALUE(false, "'", printable(text),
                        "' is not UTF-8, which safetensors wants of all its texts");
    }
  };
  std::string json = "{";
  if (!header.metadata.empty()) {
    json += "\"__metadata__\":{";
    for (const char* separator = ""; const auto& [key, value] : header.metadata) {
      json += separator + quoted(key) + ":" + quoted(value);
      separator = ",";
    }
    json += "}";
  }
  std::set<std::string> names = {kMetadata};
  for (const SafetensorsEntry& tensor : header.tensors) {
    TORCH_CHECK_VALUE(
        names.insert(tensor.name).second, "a tensor can't be called '", printable(tensor.name),
        "': ", tensor.name == kMetadata ? "the format has the name for itself" : "there is one already");
    const auto dtype = safetensors_dtype(tensor.dtype);
    TORCH_CHECK_VALUE(
        dtype, "tensor '", printable(tensor.name), "' has the dtype ", tensor.dtype,
        ", which safetensors does not have; convert it (to complex64, say), or save parts of it");
    if (json.size() > 1) json += ",";
    json += quoted(tensor.name) + ":{\"dtype\":\"" + *dtype + "\",\"shape\":[";
    TORCH_CHECK_VALUE(!is_packed(tensor.dtype) || !tensor.shape.empty(), "tensor '", printable(tensor.name),
                      "' of two elements has no dimension along which they stand");
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      const bool doubled = is_packed(tensor.dtype) && i + 1 == tensor.shape.size();
      json += (i == 0 ? "" : ",") + std::to_string(doubled ? 2 * tensor.shape[i] : tensor.shape[i]);
    }
    json += "],\"data_offsets\":[" + std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]}";
  }
  json += "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  TORCH_CHECK_VALUE(static_cast<int64_t>(json.size()) <= kMaxSafetensorsHeader, "the names and shapes of ",
                    header.tensors.size(), " tensors take ", json.size(), " bytes, and safetensors allows ",
                    kMaxSafetensorsHeader, "; write several files");
  static_assert(std::endian::native == std::endian::little, "the format is little-endian");
  const auto length = static_cast<uint64_t>(json.size());
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + json;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                           const std::string& what) {
  LOCKSTEP_CHECK_FILE(!json.empty() && json.front() == '{', what, ": the header does not begin with '{'");
  HeaderReader reader(data_bytes, what);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  SafetensorsHeader header = reader.take();
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t at = 0;
  const std::string* before = nullptr;
  for (const SafetensorsEntry& tensor : header.tensors) {
    LOCKSTEP_CHECK_FILE(tensor.begin >= at, what, ": tensor '", printable(tensor.name), "' begins at byte ",
                        tensor.begin, " of the data, within tensor '", before ? printable(*before) : "", "'");
    LOCKSTEP_CHECK_FILE(tensor.begin == at, what, ": bytes ", at, " to ", tensor.begin,
                        " of the data, before tensor '", printable(tensor.name), "', belong to no tensor");
    at = tensor.end;
    before = &tensor.name;
  }
  LOCKSTEP_CHECK_FILE(at == data_bytes, what, ": the file has ", data_bytes,
                      " bytes of data, of which the tensors take ", at);
  return header;
}

}  // namespace lockstep::serialization

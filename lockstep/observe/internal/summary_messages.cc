#include <protozero/pbf_builder.hpp>
#include <variant>

#include <lockstep/observe/internal/summary_messages.h>

namespace lockstep::observe::internal {
namespace {

using protozero::pbf_builder;

// The messages' fields by number, under their names in the .proto files.
enum class Event : protozero::pbf_tag_type {
  wall_time = 1,
  step = 2,
  file_version = 3,
  summary = 5,
  session_log = 7,
  source_metadata = 10
};
enum class SourceMetadata : protozero::pbf_tag_type { writer = 1 };
enum class SessionLog : protozero::pbf_tag_type { status = 1 };
enum class Summary : protozero::pbf_tag_type { value = 1 };
enum class Value : protozero::pbf_tag_type {
  tag = 1,
  simple_value = 2,
  image = 4,
  histo = 5,
  tensor = 8,
  metadata = 9
};
enum class Image : protozero::pbf_tag_type {
  height = 1,
  width = 2,
  colorspace = 3,
  encoded_image_string = 4
};
enum class Histo : protozero::pbf_tag_type {
  min = 1,
  max = 2,
  num = 3,
  sum = 4,
  sum_squares = 5,
  bucket_limit = 6,
  bucket = 7
};
enum class Metadata : protozero::pbf_tag_type { plugin_data = 1 };
enum class PluginData : protozero::pbf_tag_type { plugin_name = 1, content = 2 };
enum class Tensor : protozero::pbf_tag_type {
  dtype = 1,
  tensor_shape = 2,
  float_val = 5,
  double_val = 6,
  string_val = 8
};
enum class TensorShape : protozero::pbf_tag_type { dim = 2 };
enum class Dim : protozero::pbf_tag_type { size = 1 };
enum class HParams : protozero::pbf_tag_type { experiment = 2, session_start_info = 3, session_end_info = 4 };
enum class Experiment : protozero::pbf_tag_type { hparam_infos = 4, metric_infos = 5 };
enum class HParamInfo : protozero::pbf_tag_type { name = 1, type = 4, domain_discrete = 5 };
enum class MetricInfo : protozero::pbf_tag_type { name = 1 };
enum class MetricName : protozero::pbf_tag_type { tag = 2 };
enum class SessionStart : protozero::pbf_tag_type { hparams = 1 };
enum class SessionEnd : protozero::pbf_tag_type { status = 1 };
enum class MapEntry : protozero::pbf_tag_type { key = 1, value = 2 };
enum class AnyValue : protozero::pbf_tag_type { number_value = 2, string_value = 3, bool_value = 4 };
enum class ListValue : protozero::pbf_tag_type { values = 1 };

constexpr int kSessionStart = 1;                                 // SessionLog.SessionStatus
constexpr int kFloat = 1, kDouble = 2, kString = 7;              // DataType of tensors
constexpr int kTypeString = 1, kTypeBool = 2, kTypeFloat64 = 3;  // DataType of hyperparameters
constexpr int kSuccess = 1, kFailure = 2;                        // Status of a session
constexpr const char* kFileVersion = "brain.Event:2";

/// Starts an event: its message stays open for what it is about.
pbf_builder<Event> begin_event(std::string& bytes, const EventTime& time) {
  pbf_builder<Event> event(bytes);
  event.add_double(Event::wall_time, time.wall_time);
  if (time.step) event.add_int64(Event::step, *time.step);
  return event;
}

std::string metadata(const std::string& plugin, const std::string& content) {
  std::string bytes;
  pbf_builder<Metadata> message(bytes);
  pbf_builder<PluginData> data(message, Metadata::plugin_data);
  data.add_string(PluginData::plugin_name, plugin);
  if (!content.empty()) data.add_bytes(PluginData::content, content);
  return bytes;
}

/// A summary that holds nothing but a plugin's data.
std::string hparams_summary(const std::string& tag, HParams kind, const std::string& message) {
  std::string content;
  pbf_builder<HParams>(content).add_message(kind, message);
  std::string bytes;
  pbf_builder<Summary> summary(bytes);
  pbf_builder<Value> value(summary, Summary::value);
  value.add_string(Value::tag, tag);
  value.add_message(Value::metadata, metadata("hparams", content));
  return bytes;
}

/// A google.protobuf.Value, and the type that goes with it.
struct Typed {
  std::string value;
  int type;
};

Typed typed(const Hyperparameters::mapped_type& value) {
  Typed result{};
  pbf_builder<AnyValue> message(result.value);
  if (const bool* flag = std::get_if<bool>(&value)) {
    message.add_bool(AnyValue::bool_value, *flag);
    result.type = kTypeBool;
  } else if (const std::string* text = std::get_if<std::string>(&value)) {
    message.add_string(AnyValue::string_value, *text);
    result.type = kTypeString;
  } else {
    const auto* whole = std::get_if<int64_t>(&value);
    message.add_double(AnyValue::number_value, whole ? static_cast<double>(*whole) : std::get<double>(value));
    result.type = kTypeFloat64;
  }
  return result;
}

}  // namespace

std::string file_version_event(const EventTime& time) {
  std::string bytes;
  auto event = begin_event(bytes, time);
  event.add_string(Event::file_version, kFileVersion);
  pbf_builder<SourceMetadata> source(event, Event::source_metadata);
  source.add_string(SourceMetadata::writer, "lockstep");
  return bytes;
}

std::string session_start_event(const EventTime& time) {
  std::string bytes;
  auto event = begin_event(bytes, time);
  pbf_builder<SessionLog> log(event, Event::session_log);
  log.add_enum(SessionLog::status, kSessionStart);
  return bytes;
}

std::string summary_event(const EventTime& time, const std::string& summary) {
  std::string bytes;
  bytes.reserve(summary.size() + 32);
  begin_event(bytes, time).add_message(Event::summary, summary);
  return bytes;
}

std::string scalar_summary(const std::string& tag, double value, bool new_style, bool double_precision) {
  std::string bytes;
  pbf_builder<Summary> summary(bytes);
  pbf_builder<Value> message(summary, Summary::value);
  message.add_string(Value::tag, tag);
  if (!new_style) {
    message.add_float(Value::simple_value, static_cast<float>(value));
    return bytes;
  }
  {
    pbf_builder<Tensor> tensor(message, Value::tensor);
    tensor.add_enum(Tensor::dtype, double_precision ? kDouble : kFloat);
    if (double_precision) {
      const double values[] = {value};
      tensor.add_packed_double(Tensor::double_val, std::begin(values), std::end(values));
    } else {
      const float values[] = {static_cast<float>(value)};
      tensor.add_packed_float(Tensor::float_val, std::begin(values), std::end(values));
    }
  }
  message.add_message(Value::metadata, metadata("scalars", ""));
  return bytes;
}

std::string histogram_summary(const std::string& tag, const Histogram& histogram) {
  std::string bytes;
  pbf_builder<Summary> summary(bytes);
  pbf_builder<Value> value(summary, Summary::value);
  value.add_string(Value::tag, tag);
  pbf_builder<Histo> histo(value, Value::histo);
  histo.add_double(Histo::min, histogram.min);
  histo.add_double(Histo::max, histogram.max);
  histo.add_double(Histo::num, histogram.num);
  histo.add_double(Histo::sum, histogram.sum);
  histo.add_double(Histo::sum_squares, histogram.sum_squares);
  histo.add_packed_double(Histo::bucket_limit, histogram.bucket_limits.begin(),
                          histogram.bucket_limits.end());
  histo.add_packed_double(Histo::bucket, histogram.bucket_counts.begin(), histogram.bucket_counts.end());
  return bytes;
}

std::string image_summary(const std::string& tag, int64_t height, int64_t width, int64_t channels,
                          const std::string& png) {
  std::string bytes;
  pbf_builder<Summary> summary(bytes);
  pbf_builder<Value> value(summary, Summary::value);
  value.add_string(Value::tag, tag);
  pbf_builder<Image> image(value, Value::image);
  image.add_int32(Image::height, static_cast<int32_t>(height));
  image.add_int32(Image::width, static_cast<int32_t>(width));
  image.add_int32(Image::colorspace, static_cast<int32_t>(channels));
  image.add_bytes(Image::encoded_image_string, png);
  return bytes;
}

std::string text_summary(const std::string& tag, const std::string& text) {
  std::string bytes;
  pbf_builder<Summary> summary(bytes);
  pbf_builder<Value> value(summary, Summary::value);
  value.add_string(Value::tag, tag + "/text_summary");
  {
    pbf_builder<Tensor> tensor(value, Value::tensor);
    tensor.add_enum(Tensor::dtype, kString);
    {
      pbf_builder<TensorShape> shape(tensor, Tensor::tensor_shape);
      pbf_builder<Dim> dim(shape, TensorShape::dim);
      dim.add_int64(Dim::size, 1);
    }
    tensor.add_bytes(Tensor::string_val, text);
  }
  value.add_message(Value::metadata, metadata("text", ""));
  return bytes;
}

std::string experiment_summary(const Hyperparameters& hyperparameters, const Metrics& metrics,
                               const DiscreteDomains& domains) {
  std::string experiment;
  pbf_builder<Experiment> message(experiment);
  for (const auto& [name, value] : hyperparameters) {
    pbf_builder<HParamInfo> info(message, Experiment::hparam_infos);
    info.add_string(HParamInfo::name, name);
    info.add_enum(HParamInfo::type, typed(value).type);
    if (const auto domain = domains.find(name); domain != domains.end()) {
      pbf_builder<ListValue> list(info, HParamInfo::domain_discrete);
      for (const auto& possible : domain->second) list.add_message(ListValue::values, typed(possible).value);
    }
  }
  for (const auto& metric : metrics) {
    pbf_builder<MetricInfo> info(message, Experiment::metric_infos);
    pbf_builder<MetricName> name(info, MetricInfo::name);
    name.add_string(MetricName::tag, metric.first);
  }
  return hparams_summary("_hparams_/experiment", HParams::experiment, experiment);
}

std::string session_start_summary(const Hyperparameters& hyperparameters) {
  std::string start;
  pbf_builder<SessionStart> message(start);
  for (const auto& [name, value] : hyperparameters) {
    pbf_builder<MapEntry> entry(message, SessionStart::hparams);
    entry.add_string(MapEntry::key, name);
    entry.add_message(MapEntry::value, typed(value).value);
  }
  return hparams_summary("_hparams_/session_start_info", HParams::session_start_info, start);
}

std::string session_end_summary(bool success) {
  std::string end;
  pbf_builder<SessionEnd>(end).add_enum(SessionEnd::status, success ? kSuccess : kFailure);
  return hparams_summary("_hparams_/session_end_info", HParams::session_end_info, end);
}

}  // namespace lockstep::observe::internal

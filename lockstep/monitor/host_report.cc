#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/text/json_number.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/json_value.h>
#include <lockstep/monitor/host_report.h>
#include <lockstep/monitor/internal/report_json.h>

namespace lockstep::monitor {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

template <class T>
void put(ordered_json& object, const char* name, const std::optional<T>& value) {
  if (value) object[name] = *value;
}

template <class T>
void take(const json& object, const char* name, std::optional<T>& value) {
  if (const auto found = object.find(name); found != object.end()) value = json_value<T>(*found);
}

/// What json_number() has written.
double number_or_word(const json& value) {
  if (value.is_number()) return value.get<double>();
  const auto word = value.get<std::string>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (word == "inf" || word == "-inf") return word == "inf" ? kInfinity : -kInfinity;
  return std::numeric_limits<double>::quiet_NaN();
}

ordered_json json_of(const RankReport& rank) {
  ordered_json object = {{"rank", rank.rank}, {"world_size", rank.world_size}, {"pid", rank.pid}};
  put(object, "step", rank.step);
  put(object, "step_seconds", rank.step_seconds);
  put(object, "samples_per_second", rank.samples_per_second);
  if (rank.loss) object["loss"] = json_number(*rank.loss);
  object["phase"] = rank.phase;
  put(object, "phase_seconds", rank.phase_seconds);
  object["stopped"] = rank.stopped;
  object["waits_for"] = rank.waits_for;
  put(object, "cpu_percent", rank.cpu_percent);
  object["memory"] = rank.memory;
  object["cards"] = rank.cards;
  put(object, "card_memory", rank.card_memory);
  return object;
}

RankReport rank_of(const json& object) {
  RankReport rank;
  rank.rank = json_value<int>(object.at("rank"));
  rank.world_size = json_value<int>(object.at("world_size"));
  rank.pid = json_value<pid_t>(object.at("pid"));
  take(object, "step", rank.step);
  take(object, "step_seconds", rank.step_seconds);
  take(object, "samples_per_second", rank.samples_per_second);
  if (const auto loss = object.find("loss"); loss != object.end()) rank.loss = number_or_word(*loss);
  rank.phase = object.at("phase").get<std::string>();
  take(object, "phase_seconds", rank.phase_seconds);
  rank.stopped = object.at("stopped").get<bool>();
  rank.waits_for = json_value<std::vector<int>>(object.at("waits_for"));
  take(object, "cpu_percent", rank.cpu_percent);
  rank.memory = json_value<int64_t>(object.at("memory"));
  rank.cards = json_value<std::vector<int>>(object.at("cards"));
  take(object, "card_memory", rank.card_memory);
  return rank;
}

ordered_json json_of(const CardReport& card) {
  ordered_json object = {{"index", card.index}, {"name", card.name}};
  put(object, "used_percent", card.used_percent);
  put(object, "memory_used", card.memory_used);
  put(object, "memory_total", card.memory_total);
  object["others"] = ordered_json::array();
  for (const StrangerReport& other : card.others) {
    ordered_json stranger = {{"pid", other.pid}, {"name", other.name}, {"user", other.user}};
    put(stranger, "memory", other.memory);
    object["others"].push_back(std::move(stranger));
  }
  return object;
}

CardReport card_of(const json& object) {
  CardReport card;
  card.index = json_value<int>(object.at("index"));
  card.name = object.at("name").get<std::string>();
  take(object, "used_percent", card.used_percent);
  take(object, "memory_used", card.memory_used);
  take(object, "memory_total", card.memory_total);
  for (const json& stranger : object.at("others")) {
    StrangerReport& other = card.others.emplace_back();
    other.pid = json_value<pid_t>(stranger.at("pid"));
    other.name = stranger.at("name").get<std::string>();
    other.user = stranger.at("user").get<std::string>();
    take(stranger, "memory", other.memory);
  }
  return card;
}

}  // namespace

ordered_json internal::json_of(const HostReport& report) {
  ordered_json object = {
      {"job", report.job}, {"program", report.program}, {"host", report.host}, {"cores", report.cores}};
  put(object, "cpu_percent", report.cpu_percent);
  object["memory_used"] = report.memory_used;
  object["memory_total"] = report.memory_total;
  put(object, "received_per_second", report.received_per_second);
  put(object, "sent_per_second", report.sent_per_second);
  object["cards"] = ordered_json::array();
  for (const CardReport& card : report.cards) object["cards"].push_back(monitor::json_of(card));
  object["ranks"] = ordered_json::array();
  for (const RankReport& rank : report.ranks) object["ranks"].push_back(monitor::json_of(rank));
  if (report.generation > 0) {
    object["generation"] = report.generation;
    object["idles"] = report.idles;
  }
  return object;
}

std::string to_json(const HostReport& report) {
  return json_text(internal::json_of(report));
}

std::optional<HostReport> parse_host_report(std::string_view text) {
  try {
    const json object = json::parse(text);
    HostReport report;
    report.job = object.at("job").get<std::string>();
    report.program = object.at("program").get<std::string>();
    report.host = object.at("host").get<std::string>();
    report.cores = json_value<int>(object.at("cores"));
    take(object, "cpu_percent", report.cpu_percent);
    report.memory_used = json_value<int64_t>(object.at("memory_used"));
    report.memory_total = json_value<int64_t>(object.at("memory_total"));
    take(object, "received_per_second", report.received_per_second);
    take(object, "sent_per_second", report.sent_per_second);
    for (const json& card : object.at("cards")) report.cards.push_back(card_of(card));
    for (const json& rank : object.at("ranks")) report.ranks.push_back(rank_of(rank));
    report.generation = json_value<uint64_t>(object.value("generation", json(0)));
    report.idles = object.value("idles", false);
    return report;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::monitor

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>

#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/base/text/terminal_text.h>
#include <lockstep/monitor/internal/report_json.h>
#include <lockstep/monitor/job_table.h>

namespace lockstep::monitor {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

using Line = std::vector<std::string>;

/// With the heads of hosts and of ranks, and a line of each.
constexpr int kLeastRows = 8;

std::string number_text(double value, int digits) {
  return formatted("%.*f", digits, value);
}

/// "9.60", "123", "1.2e+09": as much as a column has room for.
std::string short_number(double value) {
  return formatted("%.4g", value);
}

template <class T, class Text>
std::string or_dash(const std::optional<T>& value, Text&& text) {
  return value ? text(*value) : "-";
}

/// The line in place of those that are left out.
std::string left_out_text(const std::string& what) {
  return "… and " + what + " for which the terminal has no room";
}

std::string percent_text(double value) {
  return number_text(value, 0) + " %";
}

std::string megabytes(double bytes) {
  return number_text(bytes / 1e6, 1);
}

/// Columns that stand in `left` begin at the left, others end at the right.
std::vector<std::string> aligned(const std::vector<Line>& lines, const std::set<size_t>& left) {
  std::vector<int> widths(lines.front().size());
  for (const Line& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], terminal_text::columns(line[i]));
  }
  std::vector<std::string> result;
  for (const Line& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string blank(static_cast<size_t>(widths[i] - terminal_text::columns(line[i])), ' ');
      text += (i == 0 ? "" : "  ") + (left.count(i) != 0 ? line[i] + blank : blank + line[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    result.push_back(text);
  }
  return result;
}

std::map<int, const RankReport*> ranks_of(const std::vector<HostReport>& hosts) {
  std::map<int, const RankReport*> ranks;
  for (const HostReport& host : hosts) {
    for (const RankReport& rank : host.ranks) ranks.emplace(rank.rank, &rank);
  }
  return ranks;
}

std::optional<int> cause_of(const std::map<int, const RankReport*>& ranks, int rank) {
  const auto own = ranks.find(rank);
  // What one that is stopped has waited for may have come since.
  if (own == ranks.end() || own->second->stopped || own->second->waits_for.empty()) return std::nullopt;
  std::set<int> seen = {rank};
  std::vector<int> open(own->second->waits_for.rbegin(), own->second->waits_for.rend());
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    if (!seen.insert(at).second) continue;
    const auto found = ranks.find(at);
    if (found == ranks.end() || found->second->stopped || found->second->waits_for.empty()) return at;
    open.insert(open.end(), found->second->waits_for.rbegin(), found->second->waits_for.rend());
  }
  return own->second->waits_for.front();
}

/// "forward", "stopped", "waiting 12 s"
std::string phase_text(const RankReport& rank) {
  if (rank.stopped) return "stopped";
  std::string text = printable(rank.phase, 20);
  constexpr double kLong = 1;  // before that it is as short as a glance at the table
  if (!text.empty() && rank.phase_seconds.value_or(0) >= kLong)
    text += " " + number_text(*rank.phase_seconds, 0) + " s";
  return text.empty() ? "-" : text;
}

std::string awaited_text(const std::map<int, const RankReport*>& ranks, int rank) {
  const auto cause = cause_of(ranks, rank);
  if (!cause) return "";
  const auto found = ranks.find(*cause);
  const std::string what = found == ranks.end() ? "" : phase_text(*found->second);
  return "rank " + std::to_string(*cause) + (what.empty() || what == "-" ? "" : " (" + what + ")");
}

std::optional<double> samples_per_second(const std::map<int, const RankReport*>& ranks) {
  std::optional<double> sum;
  for (const auto& [number, rank] : ranks) {
    if (rank->samples_per_second) sum = sum.value_or(0) + *rank->samples_per_second;
  }
  return sum;
}

uint64_t newest_generation(const std::vector<HostReport>& hosts) {
  uint64_t newest = 0;
  for (const HostReport& host : hosts) newest = std::max(newest, host.generation);
  return newest;
}

int world_size_of(const std::map<int, const RankReport*>& ranks) {
  return ranks.empty() ? 0 : ranks.begin()->second->world_size;
}

std::string title_of(const std::vector<HostReport>& hosts, const std::map<int, const RankReport*>& ranks) {
  std::string title = "job " + printable(hosts.front().job, 80) + ": ";
  if (const auto next = restarting_generation(hosts)) {
    title += "restarting (generation " + std::to_string(*next) + ")";
  } else if (const uint64_t newest = newest_generation(hosts); newest > 0 && ranks.empty()) {
    title += "no ranks of generation " + std::to_string(newest);
  } else {
    title += counted(ranks.size(), "rank");
  }
  if (static_cast<int>(ranks.size()) < world_size_of(ranks))
    title += " of " + std::to_string(world_size_of(ranks));
  title += " on " + counted(hosts.size(), "host");
  if (const auto sum = samples_per_second(ranks)) title += ", " + number_text(*sum, 0) + " samples/s";
  if (!hosts.front().program.empty()) title += ": " + printable(hosts.front().program, 200);
  return title;
}

size_t cards_of(const std::vector<HostReport>& hosts) {
  size_t cards = 0;
  for (const HostReport& host : hosts) cards += host.cards.size();
  return cards;
}

/// With their heads.
size_t host_line_count(const std::vector<HostReport>& hosts) {
  return 1 + hosts.size() + cards_of(hosts);
}

/// What the card's line says; others' processes by their names, as many as there are.
std::string card_text(const CardReport& card) {
  std::string text = "  gpu " + std::to_string(card.index) + " " + printable(card.name, 60) + ": " +
                     or_dash(card.used_percent, percent_text) + ", " +
                     (card.memory_used && card.memory_total
                          ? format_bytes(*card.memory_used) + " of " + format_bytes(*card.memory_total)
                          : "-");
  for (const StrangerReport& other : card.others) {
    text += "; not of this job: " + (other.name.empty() ? "a process" : printable(other.name, 40)) +
            " (pid " + std::to_string(other.pid) +
            (other.user.empty() ? "" : " of " + printable(other.user, 40)) + ")";
    if (other.memory) text += " " + format_bytes(*other.memory);
  }
  return text;
}

/// At most `room` lines, two at least. Where that is too few, cards are left out, then hosts, the last ones first.
std::vector<std::string> host_lines(const std::vector<HostReport>& hosts, size_t room) {
  const size_t all_cards = cards_of(hosts);
  const bool too_many = host_line_count(hosts) > room;
  const size_t most_hosts = too_many ? std::min(hosts.size(), room - 2) : hosts.size();
  const size_t most_cards = too_many ? room - 2 - most_hosts : all_cards;
  std::vector<Line> lines = {{"host", "cpu", "memory", "received, sent (MB/s)"}};
  for (const HostReport& host : hosts) {
    const auto rate = [](const std::optional<double>& bytes) { return or_dash(bytes, megabytes); };
    lines.push_back({printable(host.host, 60),
                     or_dash(host.cpu_percent, percent_text) + " of " + counted(host.cores, "core"),
                     format_bytes(host.memory_used) + " of " + format_bytes(host.memory_total),
                     rate(host.received_per_second) + ", " + rate(host.sent_per_second)});
  }
  const std::vector<std::string> texts = aligned(lines, {0});
  std::vector<std::string> result = {texts.front()};
  size_t cards = 0;
  for (size_t i = 0; i < most_hosts; ++i) {
    result.push_back(texts[i + 1]);
    for (const CardReport& card : hosts[i].cards) {
      if (cards == most_cards) break;
      result.push_back(card_text(card));
      ++cards;
    }
  }
  if (too_many) {
    std::string what = most_hosts < hosts.size() ? counted(hosts.size() - most_hosts, "host") : "";
    if (cards < all_cards) what += (what.empty() ? "" : " and ") + counted(all_cards - cards, "card");
    result.push_back(left_out_text(what));
  }
  return result;
}

std::vector<std::string> rank_lines(const std::vector<HostReport>& hosts,
                                    const std::map<int, const RankReport*>& ranks) {
  const bool on_cards =
      std::any_of(ranks.begin(), ranks.end(), [](const auto& rank) { return !rank.second->cards.empty(); });
  std::map<int, std::string> host_of;
  for (const HostReport& host : hosts) {
    for (const RankReport& rank : host.ranks) host_of.emplace(rank.rank, printable(host.host, 60));
  }
  Line heads = {"rank", "host",  "pid",       "step", "ms/step", "samples/s",
                "loss", "phase", "waits for", "cpu",  "memory"};
  if (on_cards) heads.push_back("gpu");
  std::vector<Line> lines = {heads};
  for (const auto& [number, rank] : ranks) {
    Line line = {std::to_string(number),
                 host_of.at(number),
                 std::to_string(rank->pid),
                 or_dash(rank->step, [](int64_t step) { return std::to_string(step); }),
                 or_dash(rank->step_seconds, [](double seconds) { return short_number(seconds * 1e3); }),
                 or_dash(rank->samples_per_second, short_number),
                 or_dash(rank->loss, short_number),
                 phase_text(*rank),
                 awaited_text(ranks, number),
                 or_dash(rank->cpu_percent, percent_text),
                 format_bytes(rank->memory)};
    if (on_cards) {
      std::string cards = c10::Join(", ", rank->cards);
      if (rank->card_memory) cards += ": " + format_bytes(*rank->card_memory);
      line.push_back(cards.empty() ? "-" : cards);
    }
    lines.push_back(std::move(line));
  }
  return aligned(lines, {1, 7, 8, 11});
}

}  // namespace

std::optional<int> held_up_by(const std::vector<HostReport>& hosts, int rank) {
  return cause_of(ranks_of(hosts), rank);
}

bool has_all_ranks(const std::vector<HostReport>& hosts) {
  const auto ranks = ranks_of(hosts);
  return !ranks.empty() && static_cast<int>(ranks.size()) >= world_size_of(ranks);
}

void forget_former_generations(std::vector<HostReport>& hosts) {
  const uint64_t newest = newest_generation(hosts);
  for (HostReport& host : hosts) {
    if (host.generation < newest) host.ranks.clear();
  }
}

std::optional<uint64_t> restarting_generation(const std::vector<HostReport>& hosts) {
  const uint64_t newest = newest_generation(hosts);
  const bool restarts = std::all_of(hosts.begin(), hosts.end(), [newest](const HostReport& host) {
    return host.ranks.empty() && (host.idles || host.generation < newest);
  });
  return newest > 0 && restarts ? std::optional(newest + 1) : std::nullopt;
}

std::string draw_table(const std::vector<HostReport>& hosts, const JobTableOptions& options) {
  if (hosts.empty()) return "no ranks\n";
  const auto ranks = ranks_of(hosts);
  std::vector<std::string> of_ranks =
      ranks.empty() ? std::vector<std::string>{"no ranks"} : rank_lines(hosts, ranks);
  size_t room_of_hosts = host_line_count(hosts), room_of_ranks = of_ranks.size();
  if (options.rows > 0) {
    // Below the title, with a blank line above each part.
    const size_t room = static_cast<size_t>(std::max(options.rows, kLeastRows)) - 3;
    // A third is the hosts', and what the ranks do not need.
    const size_t rest = room - std::min(room, of_ranks.size());
    room_of_hosts = std::min(room_of_hosts, std::max({room / 3, rest, size_t{2}}));
    room_of_ranks = room - room_of_hosts;
  }
  if (of_ranks.size() > room_of_ranks) {
    const size_t hidden = of_ranks.size() - (room_of_ranks - 1);
    of_ranks.resize(room_of_ranks - 1);
    of_ranks.push_back(left_out_text(counted(hidden, "rank")));
  }
  std::vector<std::string> lines = {title_of(hosts, ranks), ""};
  for (std::string& line : host_lines(hosts, room_of_hosts)) lines.push_back(std::move(line));
  lines.emplace_back();
  lines.insert(lines.end(), of_ranks.begin(), of_ranks.end());
  std::string text;
  for (const std::string& line : lines) {
    text += (options.columns > 0 ? terminal_text::cut(line, options.columns) : line) + "\n";
  }
  return text;
}

std::string job_json(const std::vector<HostReport>& hosts) {
  const auto ranks = ranks_of(hosts);
  ordered_json object = {{"job", hosts.empty() ? "" : hosts.front().job},
                         {"program", hosts.empty() ? "" : hosts.front().program},
                         {"world_size", world_size_of(ranks)}};
  if (const auto sum = samples_per_second(ranks)) object["samples_per_second"] = *sum;
  if (const auto next = restarting_generation(hosts)) object["restarting"] = *next;
  object["hosts"] = ordered_json::array();
  for (const HostReport& host : hosts) {
    ordered_json one = internal::json_of(host);
    for (ordered_json& rank : one["ranks"]) {
      if (const auto cause = cause_of(ranks, rank["rank"].get<int>())) rank["held_up_by"] = *cause;
    }
    object["hosts"].push_back(std::move(one));
  }
  // ASCII alone: some of the other characters control terminals.
  return object.dump(2, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep::monitor

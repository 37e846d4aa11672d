#include <algorithm>
#include <array>
#include <cstdlib>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/flight/analysis.h>
#include <lockstep/flight/internal/picture.h>

namespace lockstep::flight {
namespace {

using internal::Picture;
using Kind = RecordFinding::Kind;

constexpr std::array<const char*, 10> kKinds = {"mismatch", "circular", "missing", "unmatched",   "late",
                                                "failed",   "unknown",  "root",    "in_progress", "note"};

/// What a terminal would obey becomes '?'; UTF-8 passes.
void make_printable(std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte < 0x20 && byte != '\n') || byte == 0x7f) text[i] = '?';
    // U+0080 to U+009F, of which some are begins of commands
    const bool control =
        byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (control) text[i] = text[i + 1] = '?';
  }
}

/// The same for a text that stands within a line.
void make_one_line(std::string& text) {
  make_printable(text);
  std::replace(text.begin(), text.end(), '\n', ' ');
}

void make_printable(RankRecord& record) {
  for (std::string* text : {&record.host, &record.program, &record.reason}) make_one_line(*text);
  for (GroupRecord& group : record.groups) {
    make_one_line(group.name);
    for (std::string& host : group.hosts) make_one_line(host);
  }
  for (Entry& entry : record.entries) {
    make_printable(entry.error);
    for (std::string* text :
         {&entry.operation, &entry.detail, &entry.file, &entry.function, &entry.purpose}) {
      make_one_line(*text);
    }
    for (Tensors* tensors : {&entry.inputs, &entry.outputs}) {
      for (std::string& dtype : tensors->dtypes) make_one_line(dtype);
    }
  }
}

RecordFinding note(std::vector<int> ranks, std::string text) {
  RecordFinding finding;
  finding.ranks = std::move(ranks);
  finding.text = std::move(text);
  return finding;
}

/// Takes out what an earlier run left in the directory: it was written before another rank's program started,
/// or in a world of another size.
void drop_earlier_runs(std::vector<RankRecord>& records, std::vector<RecordFinding>& findings) {
  constexpr int64_t kClockSkewNs = 5'000'000'000;  // between hosts
  const RankRecord newest = *std::max_element(
      records.begin(), records.end(),
      [](const RankRecord& a, const RankRecord& b) { return a.realtime_ns < b.realtime_ns; });
  std::vector<int> earlier;
  std::erase_if(records, [&](const RankRecord& record) {
    const int64_t slack = record.boot_id == newest.boot_id ? 0 : kClockSkewNs;
    const bool old = record.world_size != newest.world_size || record.realtime_ns + slack < newest.loaded_ns;
    if (old) earlier.push_back(record.rank);
    return old;
  });
  if (earlier.empty()) return;
  std::string text = "note: the records of " + name_ranks(earlier) +
                     " are of an earlier run and are left out: they were written before rank " +
                     std::to_string(newest.rank) + "'s program started, or in a world of another size";
  findings.push_back(note(earlier, std::move(text)));
}

RankSummary summary_of(const RankRecord& record) {
  RankSummary summary{.rank = record.rank,
                      .pid = record.pid,
                      .host = record.host,
                      .reason = record.reason,
                      .operations = record.entries.size(),
                      .overwritten = record.overwritten};
  if (record.entries.empty()) return summary;
  const Entry& last = record.entries.back();
  const GroupRecord& group = record.groups[static_cast<size_t>(last.group)];
  summary.last = internal::call_of(last, group) + " at " + internal::site_of(last) + ", " +
                 (last.point_to_point ? "message " : "sequence ") + std::to_string(last.sequence) +
                 " of group \"" + group.name + "\", " + internal::state_of(last, record);
  return summary;
}

/// The cause, if there is one: see Analysis::cause.
std::vector<int> cause_of(const std::vector<RecordFinding>& findings) {
  for (const RecordFinding& finding : findings) {
    if (finding.kind == Kind::kRoot) return finding.ranks;
  }
  if (findings.empty() || !is_problem(findings.front().kind) || findings.front().kind == Kind::kFailed)
    return {};
  return findings.front().ranks;
}

/// `reference`: the host of the first record.
std::vector<HostSummary> hosts_of(const Picture& picture, const std::string& reference,
                                  std::vector<RecordFinding>& findings) {
  constexpr int64_t kWorthTelling = 100'000'000;
  std::vector<HostSummary> hosts;
  for (const auto& [name, ranks] : picture.hosts()) {
    HostSummary host{.name = name, .ranks = ranks, .clock_ahead_ns = std::nullopt};
    for (const int rank : ranks) {
      const RankRecord* record = picture.record_of(rank);
      const auto offset = record == nullptr ? std::nullopt : picture.clocks().wall_offset(*record);
      if (!offset) continue;
      host.clock_ahead_ns = offset->ns;
      host.clock_error_ns = offset->error_ns;
      break;
    }
    if (std::abs(host.clock_ahead_ns.value_or(0)) > kWorthTelling + host.clock_error_ns) {
      const bool ahead = *host.clock_ahead_ns > 0;
      findings.push_back(note(ranks, "note: the clock of " + name + " is " +
                                         internal::seconds(std::abs(*host.clock_ahead_ns)) +
                                         (ahead ? " ahead of " : " behind ") + reference +
                                         "'s, as their common operations show; the times here allow for it"));
    }
    hosts.push_back(std::move(host));
  }
  return hosts;
}

/// The hosts of these ranks.
std::vector<std::string> host_names_of(const Analysis& analysis, const std::vector<int>& ranks) {
  std::vector<std::string> names;
  for (const HostSummary& host : analysis.hosts) {
    const bool among = std::any_of(host.ranks.begin(), host.ranks.end(), [&](int rank) {
      return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    });
    if (among) names.push_back(host.name);
  }
  return names;
}

std::string line_of(const RankSummary& rank) {
  std::string text = "rank " + std::to_string(rank.rank) + " (pid " + std::to_string(rank.pid) + " on " +
                     rank.host + "; " + rank.reason + "): " + std::to_string(rank.operations) + " operations";
  if (rank.overwritten > 0) text += " and " + std::to_string(rank.overwritten) + " older ones, not kept";
  if (!rank.last.empty()) text += "; last: " + rank.last;
  return text + "\n";
}

}  // namespace

const char* to_string(RecordFinding::Kind kind) {
  return kKinds.at(static_cast<size_t>(kind));
}

bool is_problem(RecordFinding::Kind kind) {
  return kind < Kind::kRoot;
}

bool Analysis::problem() const {
  return std::any_of(findings.begin(), findings.end(),
                     [](const RecordFinding& finding) { return is_problem(finding.kind); });
}

Analysis analyze(std::vector<RankRecord> records) {
  TORCH_CHECK_VALUE(!records.empty(), "analyze: no flight records");
  Analysis analysis;
  for (RankRecord& record : records) make_printable(record);
  std::sort(records.begin(), records.end(),
            [](const RankRecord& a, const RankRecord& b) { return a.rank < b.rank; });
  drop_earlier_runs(records, analysis.findings);
  analysis.world_size = records.front().world_size;
  const Picture picture(records);
  for (const RankRecord& record : records) analysis.ranks.push_back(summary_of(record));
  for (int rank = 0; rank < analysis.world_size; ++rank) {
    if (picture.record_of(rank) == nullptr) analysis.without_record.push_back(rank);
  }
  std::vector<internal::Wait> waits;
  internal::find_stuck_collectives(picture, analysis.findings, waits);
  internal::find_unmatched_messages(picture, analysis.findings, waits);
  internal::find_circle_or_root(picture, waits, analysis.findings);
  analysis.hosts = hosts_of(picture, records.front().host, analysis.findings);
  std::stable_sort(analysis.findings.begin(), analysis.findings.end(),
                   [](const RecordFinding& a, const RecordFinding& b) { return a.kind < b.kind; });
  analysis.cause = cause_of(analysis.findings);
  if (picture.spans_hosts() && !analysis.cause.empty()) analysis.cause_text = picture.who(analysis.cause);
  return analysis;
}

std::string describe(const Analysis& analysis) {
  constexpr size_t kMostRanks = 16;
  constexpr size_t kMostFindings = 20;
  std::string text;
  for (size_t i = 0; i < analysis.findings.size() && i < kMostFindings; ++i) {
    text += analysis.findings[i].text + "\n\n";
  }
  if (analysis.findings.size() > kMostFindings) {
    text += "and " + std::to_string(analysis.findings.size() - kMostFindings) + " more; --json gives all\n\n";
  }
  if (!analysis.problem()) {
    text += analysis.without_record.empty() ? "Nothing is wrong in these records.\n\n"
                                            : "Nothing is wrong in the records that are there.\n\n";
  }
  if (!analysis.cause_text.empty()) text += "Look first at " + analysis.cause_text + ".\n\n";
  size_t shown = 0;
  for (const HostSummary& host : analysis.hosts) {
    for (const RankSummary& rank : analysis.ranks) {
      const bool here = std::find(host.ranks.begin(), host.ranks.end(), rank.rank) != host.ranks.end();
      if (here && shown++ < kMostRanks) text += line_of(rank);
    }
  }
  if (shown > kMostRanks) text += "and " + std::to_string(shown - kMostRanks) + " more ranks\n";
  if (!analysis.without_record.empty()) {
    text += name_ranks(analysis.without_record) + " of " + std::to_string(analysis.world_size) +
            " wrote no record\n";
  }
  return text;
}

std::string to_json(const Analysis& analysis) {
  using nlohmann::ordered_json;
  ordered_json result;
  result["status"] = analysis.problem() ? "problem" : "ok";
  result["world_size"] = analysis.world_size;
  result["cause"] = {{"ranks", analysis.cause}, {"hosts", host_names_of(analysis, analysis.cause)}};
  result["hosts"] = ordered_json::array();
  for (const HostSummary& host : analysis.hosts) {
    ordered_json json = {{"name", host.name}, {"ranks", host.ranks}};
    const auto in_seconds = [](int64_t ns) { return static_cast<double>(ns) * 1e-9; };
    json["clock_ahead_seconds"] =
        host.clock_ahead_ns ? ordered_json(in_seconds(*host.clock_ahead_ns)) : ordered_json();
    if (host.clock_ahead_ns) json["clock_error_seconds"] = in_seconds(host.clock_error_ns);
    result["hosts"].push_back(std::move(json));
  }
  result["ranks"] = ordered_json::array();
  for (const RankSummary& rank : analysis.ranks) {
    result["ranks"].push_back({{"rank", rank.rank},
                               {"pid", rank.pid},
                               {"host", rank.host},
                               {"reason", rank.reason},
                               {"operations", rank.operations},
                               {"overwritten", rank.overwritten},
                               {"last", rank.last}});
  }
  result["without_record"] = analysis.without_record;
  result["findings"] = ordered_json::array();
  for (const RecordFinding& finding : analysis.findings) {
    result["findings"].push_back({{"kind", to_string(finding.kind)},
                                  {"problem", is_problem(finding.kind)},
                                  {"ranks", finding.ranks},
                                  {"hosts", host_names_of(analysis, finding.ranks)},
                                  {"waiting", finding.waiting},
                                  {"group", finding.group},
                                  {"operation", finding.operation},
                                  {"sequence", finding.sequence},
                                  {"site", finding.site},
                                  {"text", finding.text}});
  }
  return json_text(result, 2) + "\n";
}

}  // namespace lockstep::flight

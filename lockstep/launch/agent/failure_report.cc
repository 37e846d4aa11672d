#include <algorithm>
#include <sstream>

#include <nlohmann/json.hpp>

#include <lockstep/base/ranks.h>
#include <lockstep/launch/agent/failure_report.h>

namespace lockstep::launch {
namespace {

std::string indented(const std::string& text) {
  std::string result = "    ";
  for (size_t i = 0; i < text.size(); ++i) {
    result += text[i];
    if (text[i] == '\n' && i + 1 < text.size()) result += "    ";
  }
  if (!result.ends_with('\n')) result += '\n';
  return result;
}

void describe_evidence(std::ostringstream& report, const RankEvidence& known) {
  if (known.error) report << "  its error:\n" << indented(*known.error);
  if (known.last_lines.empty()) {
    report << "  it wrote nothing to standard error\n";
  } else {
    report << "  its last lines on standard error:\n";
    for (const std::string& line : known.last_lines) report << indented(line);
  }
}

constexpr const char* kForWantOfMemory = ", by the kernel, for want of memory";

void describe_memory(std::ostringstream& report, const Ending& ending) {
  if (ending.out_of_memory.empty()) return;
  report
      << kForWantOfMemory << "\n  " << ending.out_of_memory
      << "\n  what helps: smaller batches, fewer ranks on this host, or a higher limit on the job's memory";
}

std::string process_of(const Ending& ending, const std::string& host) {
  return "(pid " + std::to_string(ending.pid) + (host.empty() ? "" : " on " + host) + ") ";
}

void describe_cause(std::ostringstream& report, const Ending& cause, std::optional<int> far_cause,
                    const RankEvidence& known, int first_rank, const std::string& host) {
  report << "lockstep run: rank " << first_rank + cause.local_rank << ' ' << process_of(cause, host);
  if (cause.asked_to_end) {
    report << "is the cause, as the other ranks' errors say; it was still running and was ended\n";
  } else if (cause.failed()) {
    if (far_cause) {
      report << "failed because of rank " << *far_cause << " on another host, as its error says: ";
    } else {
      report << "failed first: ";
    }
    report << describe_wait_status(cause.wait_status);
    describe_memory(report, cause);
    report << '\n';
  } else {
    report << "ended before the others: " << describe_wait_status(cause.wait_status)
           << ", and they waited for it; in training that comes from " << kUnequalBatches << '\n';
  }
  describe_evidence(report, known);
}

}  // namespace

std::optional<std::string> error_file_message(std::string_view json) {
  const auto parsed = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object() || !parsed.contains("message")) return std::nullopt;
  const auto& message = parsed["message"];
  if (message.is_string()) return message.get<std::string>();
  if (!message.is_object() || !message.contains("message") || !message["message"].is_string())
    return std::nullopt;
  return message["message"].get<std::string>();
}

std::string failure_report(const std::vector<Ending>& endings, const std::vector<RankEvidence>& evidence,
                           int first_rank, const std::string& host) {
  const auto first = std::find_if(endings.begin(), endings.end(), [](const Ending& ending) {
    return ending.failed() && !ending.asked_to_end;
  });
  if (first == endings.end()) return {};
  const int cause_rank = cause_of_failure(endings, first->local_rank);
  const Ending& cause = *std::find_if(endings.begin(), endings.end(),
                                      [&](const Ending& ending) { return ending.local_rank == cause_rank; });
  std::ostringstream report;
  describe_cause(report, cause, far_cause_of_failure(endings), evidence.at(static_cast<size_t>(cause_rank)),
                 first_rank, host);
  std::vector<int> asked;
  for (const Ending& ending : endings) {
    if (&ending == &cause) continue;
    if (ending.asked_to_end) asked.push_back(first_rank + ending.local_rank);
    if (ending.asked_to_end || !ending.failed()) continue;
    report << "lockstep run: then rank " << first_rank + ending.local_rank << ' ' << process_of(ending, host)
           << describe_wait_status(ending.wait_status);
    if (!ending.out_of_memory.empty()) report << kForWantOfMemory;
    const auto later = std::chrono::duration_cast<std::chrono::milliseconds>(ending.at - cause.at);
    if (later.count() >= 0) report << ", " << later.count() << " ms later";
    const RankEvidence& known = evidence.at(static_cast<size_t>(ending.local_rank));
    if (&ending == &*first) {  // what it noted as its cause may be an error that the program caught
      report << '\n';
      describe_evidence(report, known);
      continue;
    }
    if (known.error) report << ": " << known.error->substr(0, known.error->find('\n'));
    report << '\n';
  }
  if (!asked.empty())
    report << "lockstep run: " << name_ranks(asked) << (asked.size() == 1 ? " was" : " were")
           << " then ended\n";
  report << "lockstep run: docs/troubleshooting.md#what-lockstep-run-reports says what to do\n";
  return report.str();
}

}  // namespace lockstep::launch

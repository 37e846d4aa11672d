#include <algorithm>
#include <sstream>

#include <nlohmann/json.hpp>

#include <lockstep/launch/failure_report.h>

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

std::string list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string result = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) result += i + 1 == ranks.size() ? " and " : ", ";
    result += std::to_string(ranks[i]);
  }
  return result;
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

std::string failure_report(const std::vector<Ending>& endings, const std::vector<RankEvidence>& evidence) {
  std::ostringstream report;
  const Ending* first = nullptr;
  std::vector<int> asked;
  for (const Ending& ending : endings) {
    if (ending.asked_to_end) {
      asked.push_back(ending.local_rank);
      continue;
    }
    if (!ending.failed()) continue;
    const std::string how = describe_wait_status(ending.wait_status);
    const RankEvidence& known = evidence.at(static_cast<size_t>(ending.local_rank));
    if (first != nullptr) {
      const auto later = std::chrono::duration_cast<std::chrono::milliseconds>(ending.at - first->at);
      report << "lockstep run: then rank " << ending.local_rank << " (pid " << ending.pid << ") " << how
             << ", " << later.count() << " ms later";
      if (known.error) report << ": " << known.error->substr(0, known.error->find('\n'));
      report << '\n';
      continue;
    }
    first = &ending;
    report << "lockstep run: rank " << ending.local_rank << " (pid " << ending.pid
           << ") failed first: " << how << '\n';
    if (known.error) report << "  its error:\n" << indented(*known.error);
    if (known.last_lines.empty()) {
      report << "  it wrote nothing to standard error\n";
    } else {
      report << "  its last lines on standard error:\n";
      for (const std::string& line : known.last_lines) report << indented(line);
    }
  }
  if (first == nullptr) return {};
  if (!asked.empty())
    report << "lockstep run: " << list(asked) << (asked.size() == 1 ? " was" : " were") << " then ended\n";
  return report.str();
}

}  // namespace lockstep::launch

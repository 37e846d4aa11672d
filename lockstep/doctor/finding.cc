#include <algorithm>
#include <array>
#include <iomanip>
#include <sstream>

#include <nlohmann/json.hpp>

#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/doctor/finding.h>

namespace lockstep::doctor {
namespace {

constexpr std::array<Severity, 4> kSeverities = {Severity::kOk, Severity::kNote, Severity::kWarning,
                                                 Severity::kProblem};

/// Runs of white space become one space, so that a finding stays on its line.
std::string on_one_line(const std::string& text) {
  std::string line;
  std::istringstream words(text);
  for (std::string word; words >> word;) line += (line.empty() ? "" : " ") + word;
  return line;
}

}  // namespace

const char* severity_name(Severity severity) {
  constexpr std::array<const char*, 4> kNames = {"ok", "note", "warning", "problem"};
  return kNames.at(static_cast<size_t>(severity));
}

Finding ok(std::string check, std::string message) {
  return {Severity::kOk, std::move(check), std::move(message), ""};
}
Finding note(std::string check, std::string message, std::string remedy) {
  return {Severity::kNote, std::move(check), std::move(message), std::move(remedy)};
}
Finding warning(std::string check, std::string message, std::string remedy) {
  return {Severity::kWarning, std::move(check), std::move(message), std::move(remedy)};
}
Finding problem(std::string check, std::string message, std::string remedy) {
  return {Severity::kProblem, std::move(check), std::move(message), std::move(remedy)};
}

int count(const Findings& findings, Severity severity) {
  return static_cast<int>(std::count_if(findings.begin(), findings.end(),
                                        [&](const Finding& each) { return each.severity == severity; }));
}

int exit_status(const Findings& findings, bool strict) {
  const bool failed =
      count(findings, Severity::kProblem) > 0 || (strict && count(findings, Severity::kWarning) > 0);
  return failed ? 1 : 0;
}

std::string to_text(const Findings& findings) {
  std::ostringstream text;
  for (const Finding& finding : findings) {
    text << std::left << std::setw(8) << severity_name(finding.severity) << std::setw(12) << finding.check
         << ' ' << on_one_line(finding.message);
    if (!finding.remedy.empty()) text << "; do: " << on_one_line(finding.remedy);
    text << '\n';
  }
  text << counted(count(findings, Severity::kProblem), "problem") << ", "
       << counted(count(findings, Severity::kWarning), "warning") << ", "
       << counted(count(findings, Severity::kNote), "note") << '\n';
  return text.str();
}

std::string to_json(const Findings& findings, const std::string& version, bool strict) {
  nlohmann::ordered_json json;
  json["lockstep"] = version;
  json["status"] = exit_status(findings, strict);
  for (Severity severity : kSeverities) json["counts"][severity_name(severity)] = count(findings, severity);
  json["findings"] = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    json["findings"].push_back({{"severity", severity_name(finding.severity)},
                                {"check", finding.check},
                                {"message", finding.message},
                                {"remedy", finding.remedy}});
  }
  return json_text(json, 2) + "\n";
}

}  // namespace lockstep::doctor

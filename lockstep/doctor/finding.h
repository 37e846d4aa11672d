#pragma once

#include <string>
#include <vector>

namespace lockstep::doctor {

enum class Severity {
  kOk,       ///< as it should be
  kNote,     ///< worth knowing; nothing needs to be done
  kWarning,  ///< works, but slowly, or will fail in some situations
  kProblem,  ///< Lockstep or the job does not work, or computes something else than it should
};

/// "ok", "note", "warning" or "problem".
const char* severity_name(Severity severity);

/// One thing that was looked at, and what to do about it. A value.
struct Finding {
  Severity severity = Severity::kOk;
  std::string check;    ///< what was looked at, one word: "cores"
  std::string message;  ///< what was found
  std::string remedy;   ///< what to do; empty for kOk
};
using Findings = std::vector<Finding>;

Finding ok(std::string check, std::string message);
Finding note(std::string check, std::string message, std::string remedy);
Finding warning(std::string check, std::string message, std::string remedy);
Finding problem(std::string check, std::string message, std::string remedy);

/// How many findings have this severity.
int count(const Findings& findings, Severity severity);

/// For scripts: 1 if there is a problem, or with `strict` a warning; else 0.
int exit_status(const Findings& findings, bool strict);

/// One line for each finding (line breaks within a message become spaces), and one that counts them.
std::string to_text(const Findings& findings);

/// {"lockstep": version, "status": exit status, "counts": {"ok": …}, "findings": [{"severity", "check",
/// "message", "remedy"}]}, indented. Bytes that are no UTF-8 are replaced.
std::string to_json(const Findings& findings, const std::string& version, bool strict);

}  // namespace lockstep::doctor

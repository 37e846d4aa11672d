#include <unistd.h>
#include <variant>

#include <c10/util/Exception.h>

#include <lockstep/rendezvous/flight_directory.h>

namespace lockstep {
namespace {

/// A name for this job that its processes on this host agree on.
std::string job_name(const Lookup& lookup) {
  Meeting meeting;
  try {
    meeting = read_launch_environment(lookup).meeting;
  } catch (const c10::ValueError&) {
    // A malformed environment was reported when the process wanted to join; here it only costs the name.
  }
  if (const auto* tcp = std::get_if<TcpMeeting>(&meeting)) {
    std::string name = tcp->run_id;
    // Our launchers' run ids are unique, but for torchrun's default, and the program may meet at an address of its own.
    const bool unique =
        tcp->run_id != "none" && lookup("LOCKSTEP_AGENT_STORE").value_or("").ends_with("/" + tcp->run_id);
    const std::string address = tcp->host + "-" + std::to_string(tcp->port);
    if (!unique) name = tcp->run_id == "none" ? address : tcp->run_id + "-" + address;
    return tcp->attempt > 0 ? name + "-attempt-" + std::to_string(tcp->attempt) : name;
  }
  if (const auto* job = std::get_if<JobMeeting>(&meeting); job != nullptr && !job->job.empty())
    return job->job;
  if (const auto* file = std::get_if<FileMeeting>(&meeting)) return file->path;
  return ::program_invocation_short_name;
}

/// Letters, digits and - . _ of the name; not too long for a file system.
std::string as_file_name(std::string name) {
  for (char& c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.' || c == '_';
    if (!plain) c = '_';
  }
  return name.substr(0, 100);
}

}  // namespace

std::string flight_directory(const Lookup& lookup) {
  if (auto chosen = lookup("LOCKSTEP_FLIGHT_DIR"); chosen && !chosen->empty()) return *chosen;
  auto root = lookup("TMPDIR");
  if (!root || root->empty()) root = "/tmp";
  return *root + "/lockstep-" + std::to_string(::geteuid()) + "/flight-" + as_file_name(job_name(lookup));
}

}  // namespace lockstep

#include <chrono>

#include <c10/util/StringUtil.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/generation.h>

namespace lockstep {
namespace {

/// The same on all hosts, whatever they are built with (FNV-1a).
uint64_t fingerprint(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) hash = (hash ^ static_cast<uint8_t>(letter)) * 0x100000001b3;
  return hash;
}

constexpr const char* kLeftOver =
    ". End what is left of the older one; a program that starts processes must not leave them behind";

}  // namespace

Generation Generation::read(const Lookup& lookup) {
  const std::string run_id = lookup("TORCHELASTIC_RUN_ID").value_or("");
  const std::string count = lookup("TORCHELASTIC_RESTART_COUNT").value_or("");
  if (!lookup("LOCKSTEP_AGENT_STORE").value_or("").ends_with("/" + run_id)) return {};
  const auto restarts = parse_number<uint64_t>(count);
  if (run_id.empty() || !restarts) return {};
  return {.number = *restarts + 1, .run = fingerprint(run_id)};
}

std::string describe_difference(const std::string& own_name, const Generation& own,
                                const std::string& other_name, const Generation& other) {
  return c10::str(own_name, " is of generation ", own.number, " of the job's processes, and ", other_name,
                  " of generation ", other.number, ": lockstep run starts a newer one in place of an older",
                  kLeftOver);
}

std::optional<std::string> objection_to_old_generation() {
  const Generation own = Generation::read(environment::text);
  if (own.number == 0) return std::nullopt;
  const auto table = ExitStatusTable::from_environment();
  if (!table) return std::nullopt;
  const auto known = table->generations();
  const std::string subject =
      c10::str("this process is of generation ", own.number, " of the job's processes, and ");
  if (known.newest > own.number) {
    return c10::str(subject, "lockstep run has started generation ", known.newest, " since", kLeftOver);
  }
  const auto overdue = BootClock::now() - known.known_until;
  if (known.newest == 0 || overdue < std::chrono::nanoseconds(0)) return std::nullopt;
  return c10::str(
      subject, "the other hosts may run generation ", own.number + 1,
      " or a later one: for longer than its lease, by ", format_duration(overdue),
      ", lockstep run on this host has had no word from the coordinator. It ends this process, and "
      "starts another when the hosts have met again; where they are only slow, give --rdzv-conf "
      "lease=16,lost_after=20");
}

}  // namespace lockstep

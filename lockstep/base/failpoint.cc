#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/text/parse_number.h>

namespace lockstep::failpoint {
namespace {

struct Action {
  std::string verb;
  std::string argument;
  int64_t at_pass = 0;  // 0: at every pass
  int64_t passes = 0;
};

std::mutex mutex;
std::map<std::string, Action, std::less<>> actions;

int64_t number_of(std::string_view text, std::string_view whole) {
  const auto number = parse_number<int64_t>(text);
  TORCH_CHECK_VALUE(number, "LOCKSTEP_FAILPOINTS: '", whole, "' needs a number");
  return *number;
}

Action parse_action(std::string_view text) {
  const std::string_view whole = text;
  Action action;
  if (auto at = text.rfind('@'); at != std::string_view::npos) {
    action.at_pass = number_of(text.substr(at + 1), whole);
    text = text.substr(0, at);
  }
  auto open = text.find('(');
  TORCH_CHECK_VALUE(open != std::string_view::npos && text.back() == ')', "LOCKSTEP_FAILPOINTS: '", whole,
                    "' is not of the form exit(N), kill(N), error(TEXT), delay(N) or errno(N)");
  action.verb = text.substr(0, open);
  action.argument = text.substr(open + 1, text.size() - open - 2);
  TORCH_CHECK_VALUE(action.verb == "exit" || action.verb == "kill" || action.verb == "error" ||
                        action.verb == "delay" || action.verb == "errno",
                    "LOCKSTEP_FAILPOINTS: unknown action '", action.verb, "'");
  if (action.verb != "error") number_of(action.argument, whole);
  return action;
}

const bool configured_from_environment = [] {
  try {
    if (auto specification = environment::text("LOCKSTEP_FAILPOINTS")) configure(*specification);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    ::_exit(2);
  }
  return true;
}();

}  // namespace

namespace internal {

std::atomic<bool> armed{false};

int pass(std::string_view name) {
  std::optional<Action> due;
  {
    std::lock_guard lock(mutex);
    auto found = actions.find(name);
    if (found == actions.end()) return 0;
    Action& action = found->second;
    ++action.passes;
    if (action.at_pass == 0 || action.at_pass == action.passes) due = action;
  }
  if (!due) return 0;
  if (due->verb == "exit") ::_exit(static_cast<int>(number_of(due->argument, due->argument)));
  if (due->verb == "kill") {
    // To this thread: a signal to the process may be taken by another one, while this one goes on for a moment.
    ::raise(static_cast<int>(number_of(due->argument, due->argument)));
    return 0;
  }
  if (due->verb == "delay") {
    std::this_thread::sleep_for(std::chrono::milliseconds(number_of(due->argument, due->argument)));
    return 0;
  }
  if (due->verb == "errno") return static_cast<int>(number_of(due->argument, due->argument));
  TORCH_CHECK(false, "failpoint ", name, ": ", due->argument);
}

}  // namespace internal

void configure(std::string_view specification) {
  std::map<std::string, Action, std::less<>> parsed;
  while (!specification.empty()) {
    auto end = std::min(specification.find(';'), specification.size());
    auto entry = specification.substr(0, end);
    specification.remove_prefix(std::min(end + 1, specification.size()));
    if (entry.empty()) continue;
    auto equals = entry.find('=');
    TORCH_CHECK_VALUE(equals != std::string_view::npos, "LOCKSTEP_FAILPOINTS: '", entry, "' has no '='");
    parsed.emplace(entry.substr(0, equals), parse_action(entry.substr(equals + 1)));
  }
  std::lock_guard lock(mutex);
  actions = std::move(parsed);
  internal::armed.store(!actions.empty(), std::memory_order_relaxed);
}

}  // namespace lockstep::failpoint

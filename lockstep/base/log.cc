#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/base/log_writer.h>

namespace lockstep::log {
namespace {

constexpr std::array<const char*, 4> kNames = {"error", "warning", "info", "debug"};
std::atomic<int> process_rank{-1};
std::atomic<Writer> chosen_writer{nullptr};

/// What the environment says.
struct Choice {
  std::optional<Level> level;  ///< of LOCKSTEP_LOG, if that is set
  std::string problem;         ///< of a variable with a value that it does not take
};

Choice read_environment() {
  Choice choice;
  // Python reads the variable when it imports torch.distributed; in C++ it has not been read yet. What the program has set by
  // c10d::setDebugLevel() stays.
  const auto debug = environment::text("TORCH_DISTRIBUTED_DEBUG");
  if (debug && c10d::debug_level() == c10d::DebugLevel::Off) {
    try {
      c10d::setDebugLevelFromEnvironment();
    } catch (const std::exception&) {
      choice.problem =
          "environment variable TORCH_DISTRIBUTED_DEBUG is '" + *debug + "'; it must be OFF, INFO, or DETAIL";
    }
  }
  if (const auto wanted = environment::text("LOCKSTEP_LOG")) {
    const auto found = std::find(kNames.begin(), kNames.end(), *wanted);
    if (found != kNames.end()) {
      choice.level = static_cast<Level>(found - kNames.begin());
    } else if (choice.problem.empty()) {
      choice.problem =
          "environment variable LOCKSTEP_LOG is '" + *wanted + "'; it takes error, warning, info or debug";
    }
  }
  return choice;
}

const Choice& choice() {
  static const Choice& read = *new Choice(read_environment());  // never destroyed: exits log, too
  return read;
}

Level level_of(c10d::DebugLevel level) {
  switch (level) {
    case c10d::DebugLevel::Off:
      return Level::kWarning;
    case c10d::DebugLevel::Info:
      return Level::kInfo;
    case c10d::DebugLevel::Detail:
      break;
  }
  return Level::kDebug;
}

}  // namespace

bool enabled(Level level) {
  const Choice& chosen = choice();
  if (!chosen.problem.empty()) {
    static std::once_flag told;
    std::call_once(told, [&] { Line(Level::kWarning).stream() << chosen.problem; });
  }
  return level <= chosen.level.value_or(level_of(c10d::debug_level()));
}

void check_environment() {
  TORCH_CHECK_VALUE(choice().problem.empty(), choice().problem);
}

void set_rank(int rank) {
  process_rank.store(rank, std::memory_order_relaxed);
}

void set_writer(Writer writer) {
  chosen_writer.store(writer, std::memory_order_release);
}

Line::~Line() {
  std::ostringstream line;
  line << "lockstep";
  if (int rank = process_rank.load(std::memory_order_relaxed); rank >= 0) line << " rank " << rank;
  line << ' ' << kNames[static_cast<size_t>(level_)] << ": " << text_.str() << '\n';
  const std::string bytes = line.str();
  if (const Writer writer = chosen_writer.load(std::memory_order_acquire)) {
    writer(bytes);
    return;
  }
  // That a log line can't be written can't be reported anywhere.
  [[maybe_unused]] auto written = ::write(STDERR_FILENO, bytes.data(), bytes.size());
}

}  // namespace lockstep::log

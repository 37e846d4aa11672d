#include <array>
#include <atomic>
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

std::optional<Level> level_from_environment() {
  auto wanted = environment::text("LOCKSTEP_LOG");
  if (!wanted) return std::nullopt;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (*wanted == kNames[i]) return static_cast<Level>(i);
  }
  C10_THROW_ERROR(ValueError, "environment variable LOCKSTEP_LOG is '" + *wanted +
                                  "'; it takes error, warning, info or debug");
}

/// Python reads the variable when it imports torch.distributed; in C++ it has not been read yet. What the
/// program has set by c10d::setDebugLevel() stays.
void load_torch_debug_level() {
  const auto wanted = environment::text("TORCH_DISTRIBUTED_DEBUG");
  if (!wanted || c10d::debug_level() != c10d::DebugLevel::Off) return;
  try {
    c10d::setDebugLevelFromEnvironment();
  } catch (const std::exception&) {
    C10_THROW_ERROR(ValueError, "environment variable TORCH_DISTRIBUTED_DEBUG is '" + *wanted +
                                    "'; it must be OFF, INFO, or DETAIL");
  }
}

/// What LOCKSTEP_LOG says, if it says anything.
std::optional<Level> read_environment() {
  load_torch_debug_level();
  return level_from_environment();
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
  static const std::optional<Level> chosen = read_environment();
  return level <= (chosen ? *chosen : level_of(c10d::debug_level()));
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

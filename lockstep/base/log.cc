#include <array>
#include <atomic>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>

namespace lockstep::log {
namespace {

constexpr std::array<const char*, 4> kNames = {"error", "warning", "info", "debug"};
std::atomic<int> process_rank{-1};

Level level_from_environment() {
  auto wanted = environment::text("LOCKSTEP_LOG");
  if (!wanted) return Level::kWarning;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (*wanted == kNames[i]) return static_cast<Level>(i);
  }
  C10_THROW_ERROR(ValueError, "environment variable LOCKSTEP_LOG is '" + *wanted +
                                  "'; it takes error, warning, info or debug");
}

}  // namespace

bool enabled(Level level) {
  static const Level threshold = level_from_environment();
  return level <= threshold;
}

void set_rank(int rank) {
  process_rank.store(rank, std::memory_order_relaxed);
}

Line::~Line() {
  std::ostringstream line;
  line << "lockstep";
  if (int rank = process_rank.load(std::memory_order_relaxed); rank >= 0) line << " rank " << rank;
  line << ' ' << kNames[static_cast<size_t>(level_)] << ": " << text_.str() << '\n';
  const std::string bytes = line.str();
  // A log line that can't be written has nowhere to complain to.
  [[maybe_unused]] auto written = ::write(STDERR_FILENO, bytes.data(), bytes.size());
}

}  // namespace lockstep::log

#pragma once

#include <sstream>

/// Lockstep's log: lines on standard error, chosen by LOCKSTEP_LOG=error|warning|info|debug. Without it
/// torch's debug level decides: TORCH_DISTRIBUTED_DEBUG=INFO, or c10d::setDebugLevel(), gives info, DETAIL
/// gives debug, OFF gives warning.
///
///     LOCKSTEP_LOG(kInfo) << "listening on port " << port;
///
/// Thread-safe; each statement is written with one write(2), so lines of several processes do not mix.
namespace lockstep::log {

enum class Level { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

/// Whether lines of this level are written. The first call reads the environment. A variable with a value that it does not take
/// counts as not set, which a line says once: what logs may stand in a destructor, or in a thread that ends the process by
/// throwing.
bool enabled(Level level);
/// Throws c10::ValueError when one of the two variables has a value it does not take.
void check_environment();
/// Puts "rank N" into the prefix of this process's lines; called once the rank is known.
void set_rank(int rank);

/// One line under construction; written by its destructor. Use the macro.
class Line {
 public:
  explicit Line(Level level) : level_(level) {}
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;
  ~Line();
  std::ostream& stream() { return text_; }

 private:
  Level level_;
  std::ostringstream text_;
};

}  // namespace lockstep::log

#define LOCKSTEP_LOG(level)                                       \
  if (!::lockstep::log::enabled(::lockstep::log::Level::level)) { \
  } else                                                          \
    ::lockstep::log::Line(::lockstep::log::Level::level).stream()

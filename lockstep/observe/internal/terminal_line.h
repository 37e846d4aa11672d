#pragma once

#include <string>
#include <string_view>

/// The line at the bottom of the terminal that a progress bar redraws, and what else this process writes
/// there: both through here, so that neither tears the other. A process has one such line, the one that was
/// drawn last. Thread-safe.
namespace lockstep::observe::internal {

/// Draws `text` over the line. From then on log lines (base/log.h) and write_above() stand above it.
void draw_terminal_line(int fd, const std::string& text);
/// Draws `text` for the last time, and ends the line.
void end_terminal_line(int fd, const std::string& text);
/// Writes whole lines to `fd`, above the line where there is one.
void write_above_terminal_line(int fd, std::string_view lines);

}  // namespace lockstep::observe::internal

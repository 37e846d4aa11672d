#pragma once

#include <string>

/// The files that --json and --plot name. An empty path is none, "-" standard output.
namespace lockstep::bench::internal {

/// Before anything is measured for a file that can't be written. Throws c10::ValueError that names the option.
void check_output_path(const std::string& option, const std::string& path);

/// Throws c10::Error when it can't be written after all.
void write_output(const std::string& path, const std::string& text);

}  // namespace lockstep::bench::internal

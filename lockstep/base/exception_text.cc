#include <sstream>

#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/text/stack_lines.h>

namespace lockstep {
namespace {

/// Where PyTorch has put another error's what() into a message, as TCPStore does, that one's stack stands within it.
std::string without_stacks(const std::string& text) {
  if (text.find("frame #") == std::string::npos) return text;
  std::string result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!is_stack_line(line)) result += (result.empty() ? "" : "\n") + line;
  }
  return result;
}

}  // namespace

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? without_stacks(known->what_without_backtrace()) : error.what();
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return text_of(e);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace lockstep

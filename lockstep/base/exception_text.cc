#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>

namespace lockstep {

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
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

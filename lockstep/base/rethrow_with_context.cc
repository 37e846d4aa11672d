#include <exception>

#include <c10/util/Exception.h>

#include <lockstep/base/rethrow_with_context.h>

namespace lockstep {

void rethrow_with_context(const std::string& context) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  try {
    throw;
  } catch (c10::Error& error) {
    error.add_context(context);
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(c10::Error(here, std::string(error.what()) + "\n  " + context));
  } catch (...) {
    std::throw_with_nested(c10::Error(here, "an exception that is not a std::exception\n  " + context));
  }
}

}  // namespace lockstep

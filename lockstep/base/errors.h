#pragma once

#include <string>

#include <c10/util/Exception.h>

/// Errors are c10's; c10 has no type of its own for a collective that timed out, so this one joins the
/// family.
namespace lockstep {

/// A peer did not come, or did not finish, within a group's timeout. Whoever catches c10::DistBackendError
/// gets it too.
class DistTimeoutError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

}  // namespace lockstep

/// C10_THROW_ERROR for DistTimeoutError.
#define LOCKSTEP_THROW_TIMEOUT(message) \
  throw ::lockstep::DistTimeoutError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message)

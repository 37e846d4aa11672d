#pragma once

#include <c10/util/Exception.h>

/// Errors are c10's; these join the family, for what c10 has no type of.
namespace lockstep {

/// A peer did not come, or did not finish, within a group's timeout. A handler of c10::DistBackendError gets
/// it too.
class DistTimeoutError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// A file of a checkpoint could not be written or read, or is damaged; on any rank. The message names the
/// file, what is wrong and, of a write that several ranks took part in, the rank. A handler of
/// c10::DistBackendError gets it too.
class CheckpointError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// The system refused a read, a write or a look: an I/O error, a stale handle, a permission. It tells nothing
/// about what is on the disk, so a checkpoint that can't be read is not taken for a damaged one.
class CheckpointIoError : public CheckpointError {
  using CheckpointError::CheckpointError;
};

}  // namespace lockstep

/// C10_THROW_ERROR for DistTimeoutError.
#define LOCKSTEP_THROW_TIMEOUT(message) \
  throw ::lockstep::DistTimeoutError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message)

/// Throws CheckpointError unless `condition`; what follows is put together to the message.
#define LOCKSTEP_CHECK_FILE(condition, ...)                                                \
  if (C10_UNLIKELY(!(condition)))                                                          \
  throw ::lockstep::CheckpointError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, \
                                    ::c10::str(__VA_ARGS__))

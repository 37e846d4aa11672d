#include <exception>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/algorithms/exposed_memory.h>

namespace lockstep::collectives::internal::algorithms {

ExposedMemory::~ExposedMemory() {
  if (data_ == nullptr || channel_.size() == 1) return;
  auto arena = channel_.transport().shared_arena();
  try {
    channel_.release_after_close([arena, data = data_] { arena->reattach(data); });
    arena->detach(data_, bytes_);
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "a tensor of a failed reduction may still be changed by late ranks until they "
                            "have left the group: "
                         << text_of(error);
  }
}

}  // namespace lockstep::collectives::internal::algorithms

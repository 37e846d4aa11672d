#pragma once

#include <string>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/parity/dictionary.h>

namespace parity {

using Tensors = c10::Dict<std::string, at::Tensor>;

/// Trains as the job says; all ranks call it. The answer: parameters and buffers by name, "losses" of this
/// rank's iterations, and where the job asks for them "buckets", their sizes in bytes.
Tensors train(const Dictionary& job, int rank, int world_size, const lockstep::ProcessGroup& pairs);

}  // namespace parity

#pragma once

#include <vector>

#include <lockstep/collectives/internal/signature.h>
#include <lockstep/collectives/reduce_kernels.h>
#include <lockstep/transport/shared_memory/group_channel.h>

/// What the collectives do with the bytes, over one group channel. Each call is one operation of the channel:
/// it begins, announces, moves and commits. Throws transport::ChannelError when the group failed; memory is
/// then as it was before kMismatch, and unspecified after any other failure.
///
/// Words: a *slice* is the part of a tensor that one rank reduces for all; a *chunk* is the part of a tensor
/// that passes through the scratch at once; *staged* means by way of the scratch, for memory that the peers
/// can't see.
namespace lockstep::algorithms {

/// How an operation will move its bytes. The same on all ranks, for it depends only on what all have
/// announced.
enum class Path {
  kPayload,       // in the announcements themselves
  kInPlace,       // where the tensors lie, in the arenas
  kStagedDirect,  // through the scratch, each rank reduces everything for itself: few ranks
  kStagedSlices,  // through the scratch, each rank reduces its slice of each chunk: many ranks
};
Path choose_path(size_t bytes, bool all_in_arena, int ranks);

/// When the operation must be done, and by whom it is run.
struct Terms {
  Deadline deadline = Deadline::never();
  bool background = false;  // by the group's communication thread
};

/// `data`: signature.numel elements of signature.dtype, reduced in place in rank order.
void all_reduce(transport::GroupChannel& channel, const Terms& terms, const Signature& signature, void* data);
/// `data`: `bytes` bytes; signature.root's go to everybody.
void broadcast(transport::GroupChannel& channel, const Terms& terms, const Signature& signature, void* data,
               size_t bytes);
/// outputs[r] receives rank r's `input`, `bytes` each. The own output may be the input itself.
void all_gather(transport::GroupChannel& channel, const Terms& terms, const Signature& signature,
                const void* input, const std::vector<void*>& outputs, size_t bytes);
void barrier(transport::GroupChannel& channel, const Terms& terms);

/// Bytes of a chunk, for tests that want many chunks from few bytes ("internal only", as Gloo's segment
/// size).
size_t chunk_bytes();
void set_chunk_bytes_for_testing(size_t bytes);

}  // namespace lockstep::algorithms

#pragma once

#include <lockstep/base/deadline.h>
#include <lockstep/collectives/algorithms/signature.h>
#include <lockstep/collectives/algorithms/staging.h>
#include <lockstep/collectives/host_compression.h>
#include <lockstep/collectives/hosts/cost_model.h>
#include <lockstep/transport/group_channel.h>

/// What the collectives do with the bytes, over one group channel. Each call is one operation of the channel:
/// it begins, announces, moves and commits. Throws transport::ChannelError when the group failed; memory is
/// then as it was before kMismatch, and unspecified after any other failure. exchange.h has the operations
/// that move data without combining them.
///
/// Words: a *slice* is the part of a tensor that one rank reduces for all; a *chunk* is the part of a tensor
/// that passes through the scratch at once; *staged* means by way of the scratch, for memory that the peers
/// can't see.
namespace lockstep::collectives::internal::algorithms {

/// When the operation must be done, by which thread it is run, and what it brings beside its arguments.
struct Terms {
  Deadline deadline = Deadline::never();
  bool background = false;            // by a communication thread beside a computing one
  ErrorFeedback* feedback = nullptr;  // of a reduction whose signature says kInt8; may be null there, too
  lockstep::hosts::CostModel wire_model = {};  // the same on all members of a group over hosts
};

/// Whose memory an operation works on: what a peer that is late writes there matters to the user alone.
enum class BufferOwner { kUser, kOperation };

/// `data`: signature.numel elements of signature.dtype, reduced in rank order; complex numbers as pairs of
/// real ones. The result replaces the data on all ranks, or if signature.root is a rank, on that one. Memory
/// of the operation's own must stay until the group is closed, should the operation fail.
void reduce(transport::GroupChannel& channel, const Terms& terms, const Signature& signature, void* data,
            BufferOwner owner);

void barrier(transport::GroupChannel& channel, const Terms& terms);

}  // namespace lockstep::collectives::internal::algorithms

#pragma once

#include <lockstep/collectives/algorithms/algorithms.h>
#include <lockstep/collectives/algorithms/exchange.h>

/// The algorithms for groups over several hosts: what the functions of these names do in algorithms.h and
/// exchange.h. Each call is one operation of the host's channel, in these phases:
///
///     announce → agree → move → commit
///
/// *Announce*: on the host, as in a group on one host. *Agree*: each host's leader tells the other leaders what
/// its host has announced; no data are touched before all agree (agreement.h). *Move*: in shared memory within a
/// host, by messages between hosts. A message lands in scratch only, from where the rank that wants the data
/// copies them; so after an error nothing changes in a user's tensor. *Commit*: a host's own, when all its members
/// have what they need. One host may so succeed where another fails; no rank gets wrong data.
///
/// Small operations take one round trip a level, for their data travel with the agreement: reductions of up to
/// kPayloadBytes as partials (AgreementPayload), exchanges of which each rank gives about so much in all as they are
/// (small_exchange.h).
///
/// Words, beside those of algorithms.h:
/// - *leader*: the first member of a host. It speaks for its host in the agreement.
/// - *segment*: the part of a tensor that passes through the scratch at once (the *chunk* of one host); several are
///   on their way at a time.
/// - *slice*: the part of a segment that one member of each host reduces, its *owner*. There are as many slices as
///   the smallest host has members, so slice s has an owner on each host: the member in place s.
/// - *partial*: what one host's values of a slice are reduced to; in a reduce_scatter, its pieces for one rank.
/// - *counterpart* of a rank on another host: the member there in its place, modulo that host's size. In a
///   reduce_scatter it is the *owner* of that host's pieces for the rank, and sends it their partial: so each rank
///   receives one piece from each other host, whatever their sizes.
///
/// Reductions give the same bits on all ranks: every element is folded in one fixed order, at one place, or at
/// several in the same order. First the members of a host, in group order (beyond eight members, of small tensors,
/// in the host's tree); then the hosts' partials, as lockstep::hosts::HostAlgorithm says. Partials of small tensors are
/// as wide as the accumulator, so these are rounded once. Partials of larger ones have the tensor's element type, for
/// the wire is what limits them: bfloat16 and float16 are rounded once a host and once for each further fold.
/// (arithmetic.h has what that means for averages.) Float32 can be encoded for the wire alone, for which
/// encoded_exchange.h has the order. A small reduce_scatter folds the pieces of all ranks in group order, rounded once; a
/// larger one as a reduction does: the members of each host, then the hosts' partials in host order.
namespace lockstep::collectives::internal::algorithms::hosts {

void reduce(transport::GroupChannel& channel, const Terms& terms, const Signature& signature, void* data,
            BufferOwner owner);

void exchange(transport::GroupChannel& channel, const Terms& terms, const Signature& signature,
              const Exchange& exchange, const Consume& consume);

void reduce_scatter(transport::GroupChannel& channel, const Terms& terms, const Signature& signature,
                    const Exchange& exchange, void* output);

void barrier(transport::GroupChannel& channel, const Terms& terms);

}  // namespace lockstep::collectives::internal::algorithms::hosts

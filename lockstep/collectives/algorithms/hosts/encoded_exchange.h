#pragma once

#include <memory>

#include <lockstep/collectives/algorithms/hosts/slice_exchange.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// kDirect and kPairwise of float32 slices whose messages are encoded (kernels/wire_codec.h). Within a host, and in
/// what is folded, nothing is rounded. Each partial is rounded once, by the host whose it is; an average is divided
/// after the last addition.
///
/// kDirect: all fold the decoded partials of all hosts, their own too, in host order. kPairwise: the owner of a part
/// folds its own partial as it is, then the decoded ones of the others in host order; the result is rounded once more,
/// and the owner takes what the others decode. To a root both give the bits that all ranks of an all-reduce get.
std::unique_ptr<SliceExchange> make_encoded_exchange(HostAlgorithm algorithm,
                                                     transport::GroupChannel& channel,
                                                     const Arithmetic& arithmetic, int slice, int root_host,
                                                     HostCompression compression);

}  // namespace lockstep::collectives::internal::algorithms::hosts

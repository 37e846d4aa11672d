#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/collectives/algorithms/hosts/arithmetic.h>
#include <lockstep/collectives/hosts/cost_model.h>
#include <lockstep/transport/group_channel.h>

/// How the owners of a slice make one result of the hosts' partials, by messages between them: HostAlgorithm says in
/// which steps and in which order.
namespace lockstep::collectives::internal::algorithms::hosts {

using lockstep::hosts::CostModel;
using lockstep::hosts::HostAlgorithm;
using lockstep::hosts::HostReduction;

/// Which one it is to be. The same on all hosts, if the model is.
HostAlgorithm algorithm_for(const HostReduction& reduction, const CostModel& model);
/// Internal only: where it can't run, the next of chain, ring and pairwise that can.
void force_host_algorithm_for_testing(std::optional<HostAlgorithm> algorithm);

/// One segment of one slice on its way.
struct Crossing {
  std::byte* partial = nullptr;  // this host's; in the end the result. Scratch
  std::byte* landing = nullptr;  // landing_bytes() of scratch for what comes
  size_t count = 0;              // elements
  // What encoding has lost and is to add, where that is kept: by element of the partial, and of what
  // encoded_results() counts.
  float* partial_errors = nullptr;
  float* result_errors = nullptr;
  std::vector<transport::wire::Handle> requests;
};

/// One algorithm, for one slice of one operation. Owners on all hosts run the same steps for the same segments in
/// the same order: that is how messages find their receives.
class SliceExchange {
 public:
  virtual ~SliceExchange() = default;
  virtual int steps() const = 0;
  /// Scratch for what comes from other hosts and what is encoded for them, for slices of `bytes`.
  virtual size_t landing_bytes(size_t bytes) const { return bytes; }
  /// The number of elements of the result that this host encodes for the others, of a slice of so many.
  virtual size_t encoded_results(size_t) const { return 0; }
  /// Begins a step: puts its messages into crossing.requests.
  virtual void post(int step, Crossing& crossing) = 0;
  /// Ends it, when all these are done. After the last step `partial` is the result, on all hosts or the root's.
  virtual void complete(int step, Crossing& crossing) = 0;
};

/// For the reductions of one operation; `slice`: this rank's. `root_host`: −1 for all hosts.
std::unique_ptr<SliceExchange> make_slice_exchange(HostAlgorithm algorithm, transport::GroupChannel& channel,
                                                   const Arithmetic& arithmetic, int slice, int root_host,
                                                   HostCompression compression);

}  // namespace lockstep::collectives::internal::algorithms::hosts

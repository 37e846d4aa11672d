#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <lockstep/collectives/algorithms/algorithms.h>
#include <lockstep/collectives/algorithms/hosts/agreement.h>
#include <lockstep/collectives/algorithms/hosts/slice_exchange.h>
#include <lockstep/collectives/algorithms/ranges.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// A large reduction, after its agreement. Each segment takes this way:
///
///     staged → reduced → exchanged → fetched
///
/// *Staged*: each member copies its data into its scratch. *Reduced*: the owners make their slices' partials in
/// their own scratch. *Exchanged*: their messages with the other hosts' owners make the results of these, step by
/// step. *Fetched*: each member that wants the result copies it from the owners' scratch. Where all members' data lie
/// in arenas nothing is staged, and owners write the results to where the data are; so for a host of one member.
///
/// The three run at a time for different segments: time is counted in ticks, and what happens in each is fixed
/// (Schedule). So all owners post their messages in the same order, and no rank waits for what another does later.
class SegmentedReduction {
 public:
  SegmentedReduction(transport::GroupChannel& channel, const Terms& terms, const Signature& signature,
                     const Arithmetic& arithmetic, Agreement& agreement, std::byte* data);

  /// The size of this rank's scratch.
  size_t scratch_bytes() const;
  /// All but the commit.
  void run();

 private:
  /// When segment k does what: it begins at tick k·interval and takes a step of the exchange every `lag` ticks.
  struct Schedule {
    size_t lag = 1;        // ticks that a message gets to arrive
    size_t interval = 1;   // ticks between segments
    size_t in_flight = 1;  // segments from the beginning of one to the end of its exchange
    size_t buffers() const { return in_flight + 2; }
  };
  static Schedule schedule_of(int steps);

  bool owns() const { return owned_slice_ < slices_; }
  bool wants_result(int rank) const { return root_ < 0 || root_ == rank; }
  size_t elements_of(size_t k) const;
  /// A slice of segment k, in elements from the beginning of the segment.
  Range slice(size_t k, int index) const;
  std::byte* staged(int place, size_t k);
  std::byte* partial(int place, size_t k);
  /// Segment k within the data of a member of this host.
  std::byte* memory(int place, size_t k);
  uint64_t number(size_t k) const { return host_.chunk_base() + k + 1; }

  void stage(size_t k);
  void begin(size_t k);
  /// Where the errors of this segment's encoding are kept. Each element has its place as long as tensors of one size
  /// are cut alike, which they are within a group.
  void find_errors(size_t k, Crossing& crossing);
  void end(size_t k);
  void fetch(size_t k);
  void exchange(size_t tick);

  transport::GroupChannel& channel_;
  transport::HostChannel& host_;
  const Arithmetic& arithmetic_;
  Agreement& agreement_;
  std::byte* data_;
  ErrorFeedback* const feedback_;
  const size_t element_;
  const size_t count_;
  const int root_;
  const int slices_;
  const int owned_slice_;
  bool in_place_ = false;
  size_t slice_bytes_ = 0;  // of a full segment
  size_t segment_ = 0;      // elements of a full one
  size_t segments_ = 0;
  size_t landing_bytes_ = 0;
  std::unique_ptr<SliceExchange> slice_exchange_;
  Schedule schedule_;
  std::vector<Crossing> crossings_;  // by buffer
};

}  // namespace lockstep::collectives::internal::algorithms::hosts

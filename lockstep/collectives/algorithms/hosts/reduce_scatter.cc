#include <algorithm>
#include <array>
#include <vector>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/hosts/arithmetic.h>
#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/hosts/small_exchange.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::GroupChannel;
using transport::GroupLayout;
using transport::HostChannel;
using Flag = HostChannel::Flag;

/// Rounds whose messages are on their way at a time.
constexpr size_t kRoundsInFlight = 4;
/// Of what is staged on the host.
constexpr size_t kStageBuffers = 2;
/// What a rank stages for one round, at most, in chunks.
constexpr size_t kChunksStaged = 16;
/// There are so many rounds at least, so that folds and messages overlap, unless windows would be smaller than this.
constexpr size_t kRoundsWanted = 8;
constexpr size_t kSmallestWindow = size_t{64} << 10;

/// A reduce_scatter after its agreement, in rounds: each takes the next window of all pieces this way:
///
///     staged → folded → exchanged → finished
///
/// *Staged*: each member copies its pieces into its scratch, unless the others can read them where they are. *Folded*:
/// each member makes its host's partials of the pieces for those ranks whose owner it is (hosts.h), and of the pieces
/// for itself. *Exchanged*: it sends the partials to these ranks, and receives the other hosts' partials for itself.
/// *Finished*: it folds the hosts' partials into the output. The round that is finished lags
/// kRoundsInFlight − 1 rounds behind the one that is begun.
class ScatteredReduction {
 public:
  ScatteredReduction(GroupChannel& channel, const Arithmetic& arithmetic, const Exchange& exchange,
                     Agreement& agreement, void* output)
      : channel_(channel),
        host_(channel.host()),
        layout_(channel.layout()),
        arithmetic_(arithmetic),
        exchange_(exchange),
        agreement_(agreement),
        output_(static_cast<std::byte*>(output)) {
    for (const Piece& piece : exchange.gives) largest_ = std::max(largest_, piece.bytes);
    const size_t most = std::min(chunk_bytes(), kChunksStaged * chunk_bytes() / channel.size());
    const size_t window = std::clamp(largest_ / kRoundsWanted, std::min(most, kSmallestWindow), most);
    window_ = std::max(kCacheLine, window / kCacheLine * kCacheLine);
    rounds_ = std::max<size_t>(1, (largest_ + window_ - 1) / window_);
    for (int rank = 0; rank < channel.size(); ++rank) {
      const bool owns = layout_.counterpart(rank, layout_.host()) == channel.rank();
      if (layout_.host_of[rank] != layout_.host() && owns) owned_.push_back(rank);
    }
  }

  size_t scratch_bytes() const {
    return (kStageBuffers * channel_.size() + kRoundsInFlight * partials()) * window_;
  }

  /// All but the commit.
  void run() {
    host_.expect_messages(largest_ * channel_.size());
    for (int place = 0; place < host_.size(); ++place) {
      offers_.emplace_back(host_, place);
      any_staged_ |= is_staged(place);
    }
    constexpr size_t kLag = kRoundsInFlight - 1;
    stage(0);
    for (size_t turn = 0; turn < rounds_ + kLag; ++turn) {
      if (turn + 1 < rounds_) stage(turn + 1);
      if (turn < rounds_) begin(turn);
      if (turn >= kLag) finish(turn - kLag);
    }
    host_.add_chunks(rounds_);
  }

 private:
  uint64_t number(size_t k) const { return host_.chunk_base() + k + 1; }
  /// Of the piece for `rank`, which has the same size on all ranks.
  Window window(int rank, size_t k) const { return window_of(exchange_.gives[rank].bytes, window_, k); }

  // The scratch: what is staged, by rank; then the owned partials, and those for this rank, by host.
  std::byte* staged(int place, int rank, size_t k) {
    return agreement_.scratch_of(place) + (k % kStageBuffers * channel_.size() + rank) * window_;
  }
  size_t partials() const { return owned_.size() + layout_.hosts.size(); }
  std::byte* partial(size_t index, size_t k) {
    return agreement_.scratch() +
           (kStageBuffers * channel_.size() + k % kRoundsInFlight * partials() + index) * window_;
  }
  std::byte* partial_of_host(int host, size_t k) { return partial(owned_.size() + host, k); }

  bool is_staged(int place) const { return offers_[place].header().place == DataPlace::kStaged; }
  void stage(size_t k) {
    if (!is_staged(host_.rank())) return;
    if (k >= kStageBuffers) host_.await_all(Flag::kReduced, number(k - kStageBuffers));
    for (int rank = 0; rank < channel_.size(); ++rank) {
      if (rank == channel_.rank()) continue;
      const Window part = window(rank, k);
      copy_bytes(staged(host_.rank(), rank, k),
                 static_cast<const std::byte*>(exchange_.gives[rank].data) + part.offset, part.bytes);
    }
    host_.publish(Flag::kStaged, number(k));
  }

  void begin(size_t k) {
    auto& requests = requests_[k % kRoundsInFlight];
    const Window own = window(channel_.rank(), k);
    for (int host = 0; host < static_cast<int>(layout_.hosts.size()); ++host) {
      if (host == layout_.host() || own.bytes == 0) continue;
      requests.push_back(
          channel_.receive(layout_.counterpart(channel_.rank(), host), partial_of_host(host, k), own.bytes));
    }
    for (int place = 0; place < host_.size(); ++place) {
      if (is_staged(place) && place != host_.rank()) host_.await_rank(Flag::kStaged, place, number(k));
    }
    for (size_t i = 0; i < owned_.size(); ++i) {
      const Window part = window(owned_[i], k);
      if (part.bytes == 0) continue;
      fold(partial(i, k), owned_[i], part, k);
      requests.push_back(channel_.send(owned_[i], partial(i, k), part.bytes));
    }
    fold(partial_of_host(layout_.host(), k), channel_.rank(), own, k);
    if (any_staged_) host_.publish(Flag::kReduced, number(k));
  }

  /// The members' pieces for `rank`.
  void fold(std::byte* partial, int rank, const Window& part, size_t k) {
    std::vector<const void*> inputs;
    for (int place = 0; place < host_.size(); ++place) inputs.push_back(piece(place, rank, part, k));
    arithmetic_.partial(partial, inputs.data(), inputs.size(), part.bytes / arithmetic_.element_size());
  }
  const std::byte* piece(int place, int rank, const Window& part, size_t k) {
    const Offer& offer = offers_[place];
    if (place == host_.rank()) return static_cast<const std::byte*>(exchange_.gives[rank].data) + part.offset;
    if (is_staged(place)) return staged(place, rank, k);
    if (offer.header().place == DataPlace::kInline) return offer.inline_for(rank) + part.offset;
    return part.bytes == 0 ? nullptr : host_.memory(place, offer.memory_for(rank)) + part.offset;
  }

  void finish(size_t k) {
    auto& requests = requests_[k % kRoundsInFlight];
    channel_.await(requests);
    requests.clear();
    std::vector<const void*> partials;
    for (int host = 0; host < static_cast<int>(layout_.hosts.size()); ++host) {
      partials.push_back(partial_of_host(host, k));
    }
    const Window own = window(channel_.rank(), k);
    arithmetic_.finish(output_ + own.offset, partials.data(), partials.size(),
                       own.bytes / arithmetic_.element_size());
  }

  GroupChannel& channel_;
  HostChannel& host_;
  const GroupLayout& layout_;
  const Arithmetic& arithmetic_;
  const Exchange& exchange_;
  Agreement& agreement_;
  std::byte* output_;
  std::vector<int> owned_;     // ranks of other hosts whose owner this rank is
  std::vector<Offer> offers_;  // by place, with entries by rank
  bool any_staged_ = false;
  size_t largest_ = 0;  // of the pieces
  size_t window_ = 0;
  size_t rounds_ = 1;
  std::array<std::vector<transport::wire::Handle>, kRoundsInFlight> requests_;
};

}  // namespace

void reduce_scatter(GroupChannel& channel, const Terms& terms, const Signature& signature,
                    const Exchange& exchange, void* output) {
  HostChannel& host = channel.host();
  const Arithmetic arithmetic(signature, channel.size());
  host.begin(terms.deadline, terms.background);
  Agreement agreement(channel);
  ScatteredReduction reduction(channel, arithmetic, exchange, agreement, output);
  write_offer(channel, exchange);
  SmallExchange small(channel, exchange);
  if (small.run(agreement, signature, reduction.scratch_bytes(), fold_into(signature, output))) return;
  failpoint::here("exchange");
  reduction.run();
  algorithms::finish(host);
}

}  // namespace lockstep::collectives::internal::algorithms::hosts

#include <algorithm>
#include <array>
#include <vector>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/hosts/agreement.h>
#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/hosts/small_exchange.h>
#include <lockstep/collectives/algorithms/offer.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::GroupChannel;
using transport::GroupLayout;
using transport::HostChannel;
using Flag = HostChannel::Flag;

/// Windows on their way at a time: one is consumed while the others travel.
constexpr size_t kWindowBuffers = 4;
/// What a rank's peers send for one round, at most, in chunks.
constexpr size_t kChunksPerRound = 16;

/// Who gives to whom, which each rank knows from the call alone.
enum class Pattern {
  kEachToEach,  // a piece for each pair; scatter is a part of that
  kEachToAll,   // one piece, for all other ranks
  kEachToRoot,  // one piece, for one rank
  kRootToAll,
};

Pattern pattern_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kAllToAllSingle:
      return Pattern::kEachToEach;
    case CollectiveKind::kGather:
      return Pattern::kEachToRoot;
    case CollectiveKind::kBroadcast:
      return Pattern::kRootToAll;
    default:
      return Pattern::kEachToAll;
  }
}

/// The ways of the data between hosts. A piece for one rank goes from its giver to that rank; a piece for all goes to
/// the giver's counterpart on each host, in whose scratch the others read it.
class Ways {
 public:
  Ways(const GroupLayout& layout, const Signature& signature)
      : layout_(layout), pattern_(pattern_of(signature.kind)), root_(signature.root) {}

  bool shared() const { return pattern_ == Pattern::kEachToAll || pattern_ == Pattern::kRootToAll; }
  /// The rank on the host of `to` that receives what `from`, of another host, gives to `to`.
  int receiver(int from, int to) const {
    return shared() ? layout_.counterpart(from, layout_.host_of[to]) : to;
  }
  /// Whether `from` gives anything at all.
  bool gives(int from) const { return pattern_ != Pattern::kRootToAll || from == root_; }
  /// Whether this rank's neighbours take anything of what it gives.
  bool gives_to_neighbours() const {
    return layout_.neighbours().size() > 1 &&
           (pattern_ != Pattern::kEachToRoot || layout_.host_of[root_] == layout_.host());
  }
  /// Where the own data go on other hosts.
  std::vector<int> destinations() const {
    std::vector<int> ranks;
    for (int to = 0; to < layout_.size(); ++to) {
      if (layout_.host_of[to] == layout_.host() || !gives(layout_.rank)) continue;
      if (pattern_ == Pattern::kEachToRoot ? to == root_ : receiver(layout_.rank, to) == to)
        ranks.push_back(to);
    }
    return ranks;
  }
  /// Whose data come to `rank`, which is on this host, from other hosts.
  std::vector<int> sources(int rank) const {
    std::vector<int> ranks;
    if (pattern_ == Pattern::kEachToRoot && rank != root_) return ranks;
    for (int from = 0; from < layout_.size(); ++from) {
      if (layout_.host_of[from] != layout_.host() && gives(from) && receiver(from, rank) == rank) {
        ranks.push_back(from);
      }
    }
    return ranks;
  }
  /// Of sources that any rank of any host has, at most: the same number for all ranks.
  size_t most_sources() const {
    if (pattern_ == Pattern::kRootToAll) return 1;
    const size_t slices = layout_.slices();
    return pattern_ == Pattern::kEachToAll ? (layout_.size() + slices - 1) / slices : layout_.size();
  }

 private:
  const GroupLayout& layout_;
  const Pattern pattern_;
  const int root_;
};

/// The part of an exchange that stays on this host.
Exchange on_this_host(const GroupLayout& layout, const Exchange& exchange) {
  Exchange local;
  for (int rank : layout.neighbours()) local.takes.push_back(exchange.takes[rank]);
  if (exchange.gives.size() <= 1) {
    local.gives = exchange.gives;
  } else {
    for (int rank : layout.neighbours()) local.gives.push_back(exchange.gives[rank]);
  }
  return local;
}

/// One exchange in rounds. All pieces pass in windows of one size, so a round brings this rank equal parts of equal
/// pieces.
class WindowedExchange {
 public:
  WindowedExchange(GroupChannel& channel, const Signature& signature, const Exchange& exchange,
                   Agreement& agreement)
      : channel_(channel),
        host_(channel.host()),
        layout_(channel.layout()),
        exchange_(exchange),
        agreement_(agreement),
        ways_(channel.layout(), signature),
        local_(on_this_host(channel.layout(), exchange)),
        destinations_(ways_.destinations()),
        sources_(ways_.sources(channel.rank())) {
    const size_t window = std::min(chunk_bytes(), kChunksPerRound * chunk_bytes() / ways_.most_sources());
    window_ = std::max(kCacheLine, window / kCacheLine * kCacheLine);
    if (exchange.gives.empty()) destinations_.clear();
  }

  const Exchange& local() const { return local_; }
  /// The largest piece on a way to or from another host.
  size_t between_hosts() const {
    size_t most = 0;
    for (int to : destinations_) most = std::max(most, give_to(to).bytes);
    for (int from : sources_) most = std::max(most, exchange_.takes[from]);
    return most;
  }
  size_t scratch_bytes() const { return kWindowBuffers * window_ * (host_.size() + sources_.size()); }

  /// All but the commit.
  void run(const Consume& consume) {
    find_sources();
    const size_t largest = read_offers();
    host_.expect_messages(largest * std::max(sources_.size(), destinations_.size()));
    for (size_t k = 0; k < std::min(rounds_, kWindowBuffers - 1); ++k) post(k);
    stage(0);
    for (size_t k = 0; k < rounds_; ++k) {
      auto& requests = requests_[k % kWindowBuffers];
      channel_.await(requests);
      requests.clear();
      host_.publish(Flag::kStaged, number(k));
      // Its buffer is free: all had read chunk k−3 before chunk k+1 was posted.
      if (k + 1 < rounds_) stage(k + 1);
      consume(windows(k));
      host_.publish(Flag::kReduced, number(k));
      if (k + kWindowBuffers - 1 >= rounds_) continue;
      if (k > 0) host_.await_all(Flag::kReduced, number(k - 1));
      post(k + kWindowBuffers - 1);
    }
    host_.add_chunks(rounds_);
  }

 private:
  struct Received {
    int place;     // of the neighbour that receives it
    size_t index;  // among its sources
  };

  uint64_t number(size_t k) const { return host_.chunk_base() + k + 1; }
  const Piece& give_to(int to) const { return exchange_.gives[exchange_.gives.size() == 1 ? 0 : to]; }
  /// In the scratch of a member: its own data for its neighbours, then what it receives.
  std::byte* staged(int place, size_t k, int to) {
    const bool for_all = offers_[place].header().entries == 1;
    return buffer(place, k) + (for_all ? 0 : to) * window_;
  }
  std::byte* received(const Received& where, size_t k) {
    return buffer(where.place, k) + (host_.size() + where.index) * window_;
  }
  std::byte* buffer(int place, size_t k) {
    return agreement_.scratch_of(place) + k % kWindowBuffers * windows_of_[place] * window_;
  }

  /// What is not received by this rank is in the scratch of a neighbour.
  void find_sources() {
    place_of_source_.resize(channel_.size());
    for (int place = 0; place < host_.size(); ++place) {
      const auto sources = ways_.sources(layout_.neighbours()[place]);
      windows_of_.push_back(host_.size() + sources.size());
      for (size_t i = 0; i < sources.size(); ++i) {
        if (ways_.shared() || place == host_.rank()) place_of_source_[sources[i]] = {place, i};
      }
    }
  }

  /// The largest piece of all.
  size_t read_offers() {
    size_t most = 0;
    for (int place = 0; place < host_.size(); ++place) {
      const Offer& offer = offers_.emplace_back(host_, place);
      most = std::max<size_t>(most, offer.header().between_hosts);
      for (int to = 0; to < host_.size(); ++to) most = std::max(most, offer.bytes_for(entry_of(offer, to)));
    }
    rounds_ = std::max<size_t>(1, (most + window_ - 1) / window_);
    return most;
  }

  /// Of what a member offers to another.
  int entry_of(const Offer& offer, int place) const {
    return offer.header().whole_bytes > 0 ? layout_.neighbours()[place] : place;
  }

  void post(size_t k) {
    auto& requests = requests_[k % kWindowBuffers];
    for (size_t i = 0; i < sources_.size(); ++i) {
      const Window part = window_of(exchange_.takes[sources_[i]], window_, k);
      if (part.bytes == 0) continue;
      requests.push_back(channel_.receive(sources_[i], received({host_.rank(), i}, k), part.bytes));
    }
    for (int to : destinations_) {
      const Piece& piece = give_to(to);
      const Window part = window_of(piece.bytes, window_, k);
      if (part.bytes == 0) continue;
      requests.push_back(
          channel_.send(to, static_cast<const std::byte*>(piece.data) + part.offset, part.bytes));
    }
  }

  void stage(size_t k) {
    const int own = host_.rank();
    if (offers_[own].header().place != DataPlace::kStaged || !ways_.gives_to_neighbours()) return;
    for (size_t to = 0; to < local_.gives.size(); ++to) {
      if (local_.gives.size() > 1 && to == static_cast<size_t>(own)) continue;
      const Window part = window_of(local_.gives[to].bytes, window_, k);
      copy_bytes(staged(own, k, static_cast<int>(to)),
                 static_cast<const std::byte*>(local_.gives[to].data) + part.offset, part.bytes);
    }
  }

  std::vector<Window> windows(size_t k) {
    std::vector<Window> windows(channel_.size());
    for (int from = 0; from < channel_.size(); ++from) {
      if (exchange_.takes[from] == 0) continue;
      Window& part = windows[from] = window_of(exchange_.takes[from], window_, k);
      if (part.bytes > 0)
        part.data = layout_.host_of[from] == layout_.host() ? near(from, part, k) : far(from, k);
    }
    return windows;
  }
  const std::byte* near(int from, const Window& part, size_t k) {
    const int place = layout_.place_of[from];
    const int own = host_.rank();
    const Offer& offer = offers_[place];
    if (place == own) return static_cast<const std::byte*>(give_to(from).data) + part.offset;
    if (offer.header().place == DataPlace::kInline)
      return offer.inline_for(entry_of(offer, own)) + part.offset;
    if (offer.header().place == DataPlace::kArena)
      return host_.memory(place, offer.memory_for(own)) + part.offset;
    host_.await_rank(Flag::kStaged, place, number(k));
    return staged(place, k, own);
  }
  const std::byte* far(int from, size_t k) {
    const Received& where = place_of_source_[from];
    host_.await_rank(Flag::kStaged, where.place, number(k));
    return received(where, k);
  }

  GroupChannel& channel_;
  HostChannel& host_;
  const GroupLayout& layout_;
  const Exchange& exchange_;
  Agreement& agreement_;
  const Ways ways_;
  const Exchange local_;
  std::vector<int> destinations_;
  const std::vector<int> sources_;
  std::vector<Received> place_of_source_;  // by rank of another host
  std::vector<size_t> windows_of_;         // by place: in a buffer
  std::vector<Offer> offers_;              // by place
  size_t window_ = 0;
  size_t rounds_ = 1;
  std::array<std::vector<transport::wire::Handle>, kWindowBuffers> requests_;
};

}  // namespace

void exchange(GroupChannel& channel, const Terms& terms, const Signature& signature, const Exchange& exchange,
              const Consume& consume) {
  HostChannel& host = channel.host();
  host.begin(terms.deadline, terms.background);
  Agreement agreement(channel);
  WindowedExchange windowed(channel, signature, exchange, agreement);
  if (SmallExchange::fits(exchange)) {
    write_offer(channel, exchange, windowed.between_hosts());
  } else {
    write_offer(host, windowed.local(), windowed.between_hosts());
  }
  SmallExchange small(channel, exchange);
  if (small.run(agreement, signature, windowed.scratch_bytes(), consume)) return;
  failpoint::here("exchange");
  windowed.run(consume);
  finish(host);
}

}  // namespace lockstep::collectives::internal::algorithms::hosts

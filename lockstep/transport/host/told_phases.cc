#include <sstream>
#include <utility>
#include <vector>

#include <lockstep/base/log.h>
#include <lockstep/base/monotonic_ns.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/process_header.h>

// Of HostTransport: how long the ranks' steps take, and which of them is slow.
namespace lockstep::transport {
namespace {

/// The ranks' windows don't end together. Of a rank that has told nothing for longer nothing is known.
bool is_recent(const PhaseTimes& times) {
  return monotonic_ns() - times.ended_ns <= 2 * times.span_ns;
}

}  // namespace

/// The first rank of the host that trains does. Another one that is first may be so for a moment alone, where the first has
/// not told of its first window yet, or has just ended.
bool HostTransport::speaks_for_host(const std::vector<RankPhases>& training) {
  windows_as_first_ = !training.empty() && training.front().rank == rank_ ? windows_as_first_ + 1 : 0;
  return windows_as_first_ >= (rank_ == layout_.neighbours().front() ? 1 : 2);
}

/// In the thread that trains, at the end of each of its windows, which last 2 s or more.
void HostTransport::on_window() {
  std::vector<RankPhases> ranks;
  for (const int rank : layout_.neighbours()) {
    const auto times = header_of(peers_[rank]->bases[0].load(std::memory_order_acquire)).phases.times();
    if (has_ended(rank) || !times || !is_recent(*times)) continue;
    ranks.push_back({rank, *times});
  }
  if (!speaks_for_host(ranks)) return;
  const int judge = layout_.hosts.front().front();
  if (!is_here(judge)) {
    for (const auto& [rank, times] : ranks) {
      ControlMessage message;
      message.kind = ControlMessage::Kind::kPhases;
      message.rank = rank;
      std::ostringstream text;
      text << times.span_ns << ' ' << times.step << ' ' << times.own;
      for (const double phase : times.phases) text << ' ' << phase;
      message.set_text(text.str());
      if (!has_ended(judge)) tell(judge, message);
    }
    return;
  }
  if (spans_hosts()) {
    std::lock_guard lock(segments_mutex_);
    for (int rank = 0; rank < world_size(); ++rank) {
      const auto& times = peers_[rank]->phases;
      if (times && !has_ended(rank) && is_recent(*times)) ranks.push_back({rank, *times});
    }
  }
  const auto change = stragglers_.look(ranks);
  if (!change) return;
  if (change->slow) {
    LOCKSTEP_LOG(kWarning) << describe(change->slow->rank) << " is slow, and the others wait for it: "
                           << lockstep::transport::describe(*change->slow);
  } else {
    LOCKSTEP_LOG(kWarning) << describe(change->before) << " is not slower than the others any more";
  }
}

/// What another host says of one of its ranks.
void HostTransport::hear_phases(int rank, const std::string& text) {
  std::istringstream words(text);
  PhaseTimes times;
  words >> times.span_ns >> times.step >> times.own;
  for (double& phase : times.phases) words >> phase;
  if (words.fail() || times.span_ns < 0) return;
  // By this host's clock.
  times.ended_ns = monotonic_ns();
  std::lock_guard lock(segments_mutex_);
  peers_[rank]->phases = times;
}

void HostTransport::begin_telling_phases(bool names_stragglers) {
  auto audience = std::make_shared<PhaseAudience>();
  const auto segment = arena_->segment(0);
  audience->board = std::shared_ptr<PhaseBoard>(segment, &header_of(segment->data()).phases);
  if (names_stragglers && world_size() > 1) {
    audience->on_window = [weak = weak_from_this()](const PhaseTimes&) {
      if (const auto self = weak.lock()) self->on_window();
    };
  }
  audience_ = std::move(audience);
  lockstep::begin_telling_phases(audience_);
}

}  // namespace lockstep::transport

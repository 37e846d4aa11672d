#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/transport/host/first_messages.h>
#include <lockstep/transport/waiting.h>

namespace lockstep::transport {
namespace {

/// On the control channel; control messages count from 0. A small message, a full-size one, and the answer to the small one,
/// before which the full-size one is not sent: TCP may put both into one packet, and where that does not pass, neither does.
constexpr uint32_t kFirstMeeting = uint32_t{1} << 31;
constexpr uint32_t kFullMeeting = kFirstMeeting + 1;
constexpr uint32_t kAnswer = kFirstMeeting + 2;

}  // namespace

void pass_first_messages(wire::Wire& wire, const std::vector<int>& ranks, const Deadline& deadline,
                         const FirstMessages& with) {
  constexpr size_t kSmall = 64;
  constexpr size_t kFull = size_t{64} << 10;
  constexpr auto kLookInterval = std::chrono::milliseconds(200);
  constexpr auto kLongestHead = std::chrono::seconds(5);
  struct Meeting {
    int rank;
    std::vector<std::byte> incoming;
    wire::Handle small, answer, full;
    std::byte answered{};
    wire::Handle own_answer, own_full;  // null until they are sent
  };
  std::vector<std::byte> outgoing(kSmall + kFull);
  static_assert(sizeof with.generation <= kSmall);
  std::memcpy(outgoing.data(), &with.generation, sizeof with.generation);
  Doorbell bell;
  std::vector<Meeting> meetings(ranks.size());
  std::vector<wire::Handle> requests;
  for (size_t i = 0; i < ranks.size(); ++i) {
    Meeting& meeting = meetings[i];
    meeting.rank = ranks[i];
    meeting.incoming.resize(kSmall + kFull);
    std::byte* incoming = meeting.incoming.data();
    meeting.small = wire.receive(ranks[i], {0, kFirstMeeting}, incoming, kSmall, &bell);
    meeting.answer = wire.receive(ranks[i], {0, kAnswer}, &meeting.answered, 1, &bell);
    meeting.full = wire.receive(ranks[i], {0, kFullMeeting}, incoming + kSmall, kFull, &bell);
    requests.insert(requests.end(), {meeting.small, meeting.answer, meeting.full});
    requests.push_back(wire.send(ranks[i], {0, kFirstMeeting}, outgoing.data(), kSmall, &bell));
  }
  struct Cancel {
    ~Cancel() {
      for (const auto& request : requests) wire.cancel(request);
    }
    wire::Wire& wire;
    const std::vector<wire::Handle>& requests;
  } cancel{wire, requests};
  const auto has_come = [](const wire::Handle& request) {
    return request->status() == wire::RequestStatus::kSucceeded;
  };
  const auto fail = [&](const Meeting& meeting, const std::string& what) {
    std::string text = with.own + ", and " + with.describe(meeting.rank) + ", can't pass messages: " + what;
    // Where TCP gets no answer to the larger one for long enough, the connection is lost.
    if (has_come(meeting.small) && !has_come(meeting.full)) {
      text += "; small messages pass, but not " + std::to_string(kFull >> 10) +
              " KiB: do all interfaces between the two hosts have the same MTU?";
    }
    return text;
  };
  // Ahead of the deadline, at which those that have met would only say that this rank is late.
  const auto patience_ends = Deadline::after(
      deadline.remaining() - std::min<std::chrono::nanoseconds>(deadline.remaining() / 10, kLongestHead));
  const auto is_over = [](const wire::Handle& request) { return request->done(); };
  /// Whether all is sent.
  const auto go_on = [&](Meeting& meeting) {
    if (!meeting.own_answer && has_come(meeting.small)) {
      meeting.own_answer = wire.send(meeting.rank, {0, kAnswer}, outgoing.data(), 1, &bell);
      requests.push_back(meeting.own_answer);
    }
    if (!meeting.own_full && has_come(meeting.answer)) {
      meeting.own_full = wire.send(meeting.rank, {0, kFullMeeting}, outgoing.data() + kSmall, kFull, &bell);
      requests.push_back(meeting.own_full);
    }
    return meeting.own_full != nullptr;
  };
  std::chrono::nanoseconds silent{0};
  auto looked = std::chrono::steady_clock::now();
  const WaitPolicy policy{.spins = 0, .yields = 20};
  while (true) {
    const auto all_over = [&] {
      bool sent = true;
      for (Meeting& meeting : meetings) sent &= go_on(meeting);
      return sent && std::all_of(requests.begin(), requests.end(), is_over);
    };
    const auto drive = [&] {
      wire.progress();
      return all_over();
    };
    wait_until(bell, policy, Deadline::after(patience_ends.remaining(kLookInterval)), drive,
               [&] { wire.before_sleep(); });
    // First this, for one of another generation gives the connection up.
    for (const Meeting& meeting : meetings) {
      if (!has_come(meeting.small)) continue;
      Generation theirs;
      std::memcpy(&theirs, meeting.incoming.data(), sizeof theirs);
      TORCH_CHECK_WITH(DistBackendError, !with.generation.differs_from(theirs),
                       describe_difference(with.own, with.generation, with.describe(meeting.rank), theirs));
    }
    for (const auto& request : requests) {
      if (!request->done() || has_come(request)) continue;
      const auto meeting = std::find_if(meetings.begin(), meetings.end(),
                                        [&](const Meeting& one) { return one.rank == request->peer(); });
      const auto patience = Deadline::after(with.patience(request->peer()));
      while (!patience.expired()) {
        with.look();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      C10_THROW_ERROR(
          DistBackendError,
          fail(*meeting, wire.lost(request->peer()).value_or("the wire has failed on this rank")));
    }
    if (all_over()) return;
    // What has failed since then is the next round's, which says more of it than with.look().
    const bool has_failed = std::any_of(requests.begin(), requests.end(), [&](const auto& request) {
      return !has_come(request) && wire.lost(request->peer());
    });
    if (has_failed) continue;
    with.look();
    // Time in which this process did not run is no silence.
    const auto now = std::chrono::steady_clock::now();
    silent += std::min<std::chrono::nanoseconds>(now - looked, 2 * kLookInterval);
    looked = now;
    for (const Meeting& meeting : meetings) {
      const bool has_spoken = wire.activity(meeting.rank) != 0 || meeting.small->done();
      TORCH_CHECK_WITH(DistBackendError, silent < with.silence_limit || has_spoken,
                       fail(meeting, "nothing has come for " + format_duration(with.silence_limit) +
                                         "; does a firewall lie between them, are these the wrong "
                                         "interfaces, or is that host stopped or lost?"));
    }
    if (!patience_ends.expired()) continue;
    for (const Meeting& meeting : meetings) {
      if (meeting.full->done()) continue;
      LOCKSTEP_THROW_TIMEOUT(fail(meeting,
                                  "nothing has come by the timeout; does a firewall lie between them, or are "
                                  "these the wrong interfaces?"));
    }
    LOCKSTEP_THROW_TIMEOUT(fail(meetings.front(), "what was sent is not through at the timeout"));
  }
}

}  // namespace lockstep::transport

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/backend/internal/monitored_barrier.h>

namespace lockstep::collectives::internal {
namespace {

using transport::ChannelError;
using transport::GroupChannel;
using transport::MessageChannel;
using transport::MessageKind;

// Messages of a kind that users' tags, which are ints, can't have. Each round has its own, so that messages
// of a round that failed are never taken for another's.
int64_t tag_of(uint64_t round, int step) {
  return (int64_t{1} << 40) + static_cast<int64_t>(round) * 4 + step;
}
enum Step { kArrival, kPresence, kAnswer };

/// Rank 0's answer: empty text for success. Fits into a mailbox, so that sending never waits.
using Answer = std::array<char, 4096>;
constexpr MessageKind kSignal{0, 0};
constexpr MessageKind kAnswerKind{sizeof(Answer), 1};

/// Keeps the memory of a message until the channel is done with it: an interruption ends this rank's wait.
MessageChannel::Callback keep(std::shared_ptr<Answer> answer) {
  return [answer = std::move(answer)](const std::exception_ptr&) {};
}

/// The error of a message once it is done, in words; empty if it went well.
std::string outcome(MessageChannel& messages, const MessageChannel::Handle& handle) {
  messages.wait(handle);
  try {
    if (auto error = messages.error(handle)) std::rethrow_exception(error);
    return "";
  } catch (const ChannelError& error) {
    return error.what();
  }
}

constexpr const char* kReached =
    " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank ";

std::string duration_text(std::chrono::milliseconds timeout) {
  return std::to_string(timeout.count()) + " ms";
}

/// Rank 0's part: which ranks are missing, in words; empty if none are.
std::string await_all(GroupChannel& channel, std::chrono::milliseconds timeout, bool wait_all_ranks,
                      uint64_t round) {
  MessageChannel& messages = channel.messages();
  const Deadline deadline = Deadline::after(timeout);
  std::vector<MessageChannel::Handle> arrivals;
  for (int rank = 1; rank < channel.size(); ++rank) {
    // Ranks that wait for this one learn that it is there and how long it will wait.
    messages.send(nullptr, kSignal, rank, tag_of(round, kPresence), deadline);
    arrivals.push_back(messages.receive(nullptr, kSignal, rank, tag_of(round, kArrival), deadline));
  }
  std::vector<int> missing;
  std::string causes;
  for (int rank = 1; rank < channel.size(); ++rank) {
    const std::string error = outcome(messages, arrivals[rank - 1]);
    if (error.empty()) continue;
    if (!missing.empty() && !wait_all_ranks) continue;  // its receive must end all the same
    missing.push_back(channel.job_rank(rank));
    causes += (causes.empty() ? "" : "; ") + error;
  }
  if (missing.empty()) return "";
  std::string who = wait_all_ranks ? "Ranks " : "Rank ";
  for (size_t i = 0; i < missing.size(); ++i) who += (i > 0 ? ", " : "") + std::to_string(missing[i]);
  return who + " failed to pass monitoredBarrier in " + duration_text(timeout) + " (" + causes + ")";
}

void tell_all(GroupChannel& channel, const std::string& text, uint64_t round) {
  const auto answer = std::make_shared<Answer>();
  std::memcpy(answer->data(), text.data(), std::min(text.size(), answer->size() - 1));
  std::vector<MessageChannel::Handle> sends;
  for (int rank = 1; rank < channel.size(); ++rank) {
    sends.push_back(channel.messages().send(answer->data(), kAnswerKind, rank, tag_of(round, kAnswer),
                                            Deadline::after(std::chrono::seconds(1)), keep(answer)));
  }
  // Mostly done already: only a rank that is behind with many other messages has no room.
  for (const auto& send : sends) channel.messages().wait(send);
}

/// The other ranks' part: what went wrong, or empty.
std::string await_answer(GroupChannel& channel, std::chrono::milliseconds timeout, uint64_t round) {
  MessageChannel& messages = channel.messages();
  const Deadline deadline = Deadline::after(timeout);
  auto presence = messages.receive(nullptr, kSignal, 0, tag_of(round, kPresence), deadline);
  if (auto error = outcome(messages, presence); !error.empty()) {
    return "Rank " + std::to_string(channel.job_rank(channel.rank())) +
           " reached monitoredBarrier, but rank " + std::to_string(channel.job_rank(0)) + " did not in " +
           duration_text(timeout) + " (" + error + ")";
  }
  // Only now: had it been sent before, a rank 0 that came after this rank gave up would think it is here.
  messages.send(nullptr, kSignal, 0, tag_of(round, kArrival), deadline);
  // From here rank 0 waits at most as long as this rank would; it needs a moment more to say how it ended.
  const auto answer = std::make_shared<Answer>();
  auto receiving = messages.receive(answer->data(), kAnswerKind, 0, tag_of(round, kAnswer),
                                    Deadline::after(timeout + std::chrono::seconds(10)), keep(answer));
  if (auto error = outcome(messages, receiving); !error.empty()) {
    return "Rank " + std::to_string(channel.job_rank(channel.rank())) + kReached +
           std::to_string(channel.job_rank(0)) + ": " + error;
  }
  answer->back() = 0;
  const std::string wrong = answer->data();
  if (wrong.empty()) return "";
  return "Rank " + std::to_string(channel.job_rank(channel.rank())) + kReached +
         std::to_string(channel.job_rank(0)) + ": " + wrong;
}

}  // namespace

void monitored_barrier(GroupChannel& channel, std::chrono::milliseconds timeout, bool wait_all_ranks,
                       uint64_t round) {
  const std::string self = "Rank " + std::to_string(channel.job_rank(channel.rank()));
  if (timeout <= std::chrono::milliseconds(0)) {
    LOCKSTEP_THROW_TIMEOUT("[" + self + "]: " + self + " timed out in monitoredBarrier after " +
                           duration_text(timeout) + "; give it a timeout of more than 0");
  }
  std::string wrong;
  try {
    if (channel.rank() == 0) {
      wrong = await_all(channel, timeout, wait_all_ranks, round);
      tell_all(channel, wrong, round);
    } else {
      wrong = await_answer(channel, timeout, round);
    }
  } catch (const ChannelError& error) {  // the group had failed before
    C10_THROW_ERROR(DistBackendError, "[Rank " + std::to_string(channel.job_rank(channel.rank())) +
                                          "]: monitored_barrier failed: " + error.what());
  }
  if (wrong.empty()) return;
  LOCKSTEP_THROW_TIMEOUT("[Rank " + std::to_string(channel.job_rank(channel.rank())) + "]: " + wrong);
}

}  // namespace lockstep::collectives::internal

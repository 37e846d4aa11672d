#include <lockstep/base/monotonic_ns.h>
#include <lockstep/transport/host/wait_record.h>

namespace lockstep::transport {
namespace {

// GivenUpWait: milliseconds of the steady clock, which processes of a host share, and the cause.
constexpr int kRankBits = 16;
constexpr int kCauseBits = kRankBits + 1;
/// As long as asking other hosts may take.
constexpr uint64_t kRecentMilliseconds = 2000;

uint64_t steady_milliseconds() {
  return static_cast<uint64_t>(monotonic_ns() / 1'000'000);
}

}  // namespace

void GivenUpWait::note(const Cause& cause) {
  const uint64_t stopped = cause.stopped ? uint64_t{1} << kRankBits : 0;
  word_.store(steady_milliseconds() << kCauseBits | stopped | static_cast<uint64_t>(cause.rank),
              std::memory_order_release);
}

std::optional<GivenUpWait::Cause> GivenUpWait::recent_cause() const {
  const uint64_t word = word_.load(std::memory_order_acquire);
  if (word == 0 || steady_milliseconds() - (word >> kCauseBits) > kRecentMilliseconds) return std::nullopt;
  return Cause{static_cast<int>(word & ((1 << kRankBits) - 1)), (word >> kRankBits & 1) != 0};
}

void GivenUpWait::renew() {
  if (const auto cause = recent_cause()) note(*cause);
}

RecordedWait::RecordedWait(WaitRecords& records, int peer, int owner, const MemoryReference& word,
                           uint64_t value, int64_t since_ns)
    : since_ns_(since_ns) {
  for (WaitRecord& record : records) {
    uint32_t unused = 0;
    if (!record.used.compare_exchange_strong(unused, 1, std::memory_order_acquire)) continue;
    record_ = &record;
    record.peer.store(peer, std::memory_order_relaxed);
    record.owner.store(owner, std::memory_order_relaxed);
    record.value.store(value, std::memory_order_relaxed);
    record.since_ns.store(since_ns, std::memory_order_relaxed);
    // Release: pairs with the reader's load of the word.
    record.word.store(pack_reference(word), std::memory_order_release);
    return;
  }
}

RecordedWait::~RecordedWait() {
  if (record_ == nullptr) return;
  record_->word.store(0, std::memory_order_relaxed);
  record_->used.store(0, std::memory_order_release);
}

}  // namespace lockstep::transport

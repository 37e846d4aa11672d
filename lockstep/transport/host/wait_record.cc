#include <lockstep/transport/host/wait_record.h>

namespace lockstep::transport {

RecordedWait::RecordedWait(WaitRecords& records, int peer, int owner, const MemoryReference& word,
                           uint64_t value) {
  for (WaitRecord& record : records) {
    uint32_t unused = 0;
    if (!record.used.compare_exchange_strong(unused, 1, std::memory_order_acquire)) continue;
    record_ = &record;
    record.peer.store(peer, std::memory_order_relaxed);
    record.owner.store(owner, std::memory_order_relaxed);
    record.value.store(value, std::memory_order_relaxed);
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

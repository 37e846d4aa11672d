#include <chrono>
#include <exception>
#include <utility>

#include <c10/util/StringUtil.h>

#include <lockstep/rendezvous/internal/call_by.h>
#include <lockstep/rendezvous/internal/store_cache.h>

namespace lockstep::rendezvous_internal {

StoreCache& StoreCache::instance() {
  static StoreCache cache;
  return cache;
}

StoreCache::~StoreCache() {
  forget_if_forked();
  for (auto& [address, entry] : entries_) {
    if (!entry->file) continue;
    // Before its end a FileStore notes in its file that it leaves; that may never return (file_store.h).
    try {
      auto sign_off = [store = std::exchange(entry->store, {})]() mutable {
        store.reset();
        return true;
      };
      call_by(Deadline::after(std::chrono::seconds(3)), std::move(sign_off), /*interruptible=*/false);
    } catch (const std::exception&) {
      // No thread can be started any more: the store has ended on this one.
    }
  }
}

void StoreCache::forget_if_forked() {
  if (!guard_.in_forked_child()) return;
  // Leaked on purpose: the servers' threads exist in the parent only, and a FileStore would note in its
  // file that the parent's leaves.
  new std::map<std::string, std::shared_ptr<Entry>>(std::move(entries_));
  entries_.clear();
  guard_ = ForkGuard();
}

std::shared_ptr<StoreCache::Entry> StoreCache::entry(const std::string& address, int rank) {
  std::lock_guard lock(mutex_);
  forget_if_forked();
  auto& found = entries_[address + " rank " + std::to_string(rank)];
  if (!found) found = std::make_shared<Entry>();
  return found;
}

std::shared_ptr<StoreCache::Entry> StoreCache::entry(const c10::intrusive_ptr<c10d::Store>& given, int rank) {
  std::lock_guard lock(mutex_);
  forget_if_forked();
  // A weak pointer keeps the address from being used again, so an entry stands for one store only.
  std::erase_if(entries_, [](const auto& item) {
    const auto& given = item.second->given;
    return given && given->expired();
  });
  auto& found = entries_[c10::str("store ", static_cast<const void*>(given.get()), " rank ", rank)];
  if (!found) {
    found = std::make_shared<Entry>();
    found->given.emplace(given);
  }
  return found;
}

}  // namespace lockstep::rendezvous_internal

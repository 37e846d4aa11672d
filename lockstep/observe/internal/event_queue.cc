#include <algorithm>
#include <bit>
#include <isa-l/crc.h>
#include <string_view>
#include <utility>

#include <ATen/record_function.h>

#include <lockstep/observe/internal/event_queue.h>
#include <lockstep/observe/internal/flush_at_exit.h>

namespace lockstep::observe::internal {
namespace {

// Waking a thread costs the caller up to tens of microseconds where cores are few. So while events come, the
// thread looks after them by itself, and it must be woken only after so many ticks without any.
constexpr std::chrono::milliseconds kTick{5};
constexpr int kQuietTicks = 40;

constexpr size_t kMostBytes = size_t{64} << 20;         // that wait, or images would fill the memory
constexpr std::chrono::duration<double> kForever{1e9};  // a longer time would overflow the clock

static_assert(std::endian::native == std::endian::little, "records are little-endian");

/// TensorFlow masks CRCs, because the CRC of bytes that hold a CRC says little.
uint32_t masked_crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffU;
  while (!bytes.empty()) {
    const auto part = bytes.substr(0, size_t{1} << 30);  // ISA-L takes an int
    // ISA-L's parameter is not const, but it only reads.
    crc = ::crc32_iscsi(const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(part.data())),
                        static_cast<int>(part.size()), crc);
    bytes.remove_prefix(part.size());
  }
  crc = ~crc;
  return std::rotr(crc, 15) + 0xa282ead8U;
}

template <class T>
std::string_view bytes_of(const T& number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

}  // namespace

void append_record(std::string& to, std::string_view event) {
  const uint64_t length = event.size();
  const uint32_t length_crc = masked_crc32c(bytes_of(length));
  const uint32_t event_crc = masked_crc32c(event);
  to.append(bytes_of(length)).append(bytes_of(length_crc)).append(event).append(bytes_of(event_crc));
}

EventQueue::EventQueue(size_t max_queue, std::chrono::duration<double> sync_interval)
    : max_queue_(max_queue), sync_interval_(std::min(sync_interval, kForever)) {
  flush_at_exit();
  thread_.start("lockstep-events", [this] { run(); });
}

EventQueue::~EventQueue() {
  if (fork_guard_.in_forked_child()) return;
  {
    const std::lock_guard lock(mutex_);
    phase_ = Phase::kStopping;
  }
  work_.notify_one();
  thread_.join();
}

bool EventQueue::end_idleness() {
  if (phase_ != Phase::kIdle) return false;
  phase_ = Phase::kWriting;
  return true;
}

void EventQueue::add(AppendFile& file, std::string event) {
  if (fork_guard_.in_forked_child()) return;
  std::unique_lock lock(mutex_);
  if (is_full()) {
    work_.notify_one();
    done_.wait(lock, [&] { return !is_full(); });
  }
  add_pending_records(1);
  waiting_bytes_ += event.size();
  waiting_.push_back({&file, std::move(event)});
  ++added_;
  const bool wake = end_idleness();
  lock.unlock();
  if (wake) work_.notify_one();
}

void EventQueue::flush() {
  if (fork_guard_.in_forked_child()) return;
  std::unique_lock lock(mutex_);
  const int64_t wanted = added_;
  sync_up_to_ = std::max(sync_up_to_, wanted);
  end_idleness();
  work_.notify_one();
  done_.wait(lock, [&] { return synced_ >= wanted; });
}

int64_t EventQueue::lost() const {
  if (fork_guard_.in_forked_child()) return 0;
  const std::lock_guard lock(mutex_);
  return lost_;
}

bool EventQueue::is_full() const {
  return waiting_.size() >= max_queue_ || waiting_bytes_ >= kMostBytes;
}

void EventQueue::run() {
  using Clock = std::chrono::steady_clock;
  const auto interval = std::chrono::duration_cast<Clock::duration>(sync_interval_);
  auto next_sync = Clock::now() + interval;
  int quiet_ticks = kQuietTicks;
  std::vector<Item> items;
  std::unique_lock lock(mutex_);
  while (true) {
    const auto urgent = [&] { return phase_ == Phase::kStopping || sync_up_to_ > synced_ || is_full(); };
    if (waiting_.empty() && quiet_ticks >= kQuietTicks && phase_ != Phase::kStopping) {
      phase_ = Phase::kIdle;
      const auto woken = [&] { return phase_ != Phase::kIdle || urgent(); };
      if (unsynced_.empty()) {
        work_.wait(lock, woken);
      } else {
        work_.wait_until(lock, next_sync, woken);
      }
      end_idleness();
    } else {
      work_.wait_for(lock, kTick, urgent);
    }
    quiet_ticks = waiting_.empty() ? quiet_ticks + 1 : 0;
    items.swap(waiting_);
    waiting_bytes_ = 0;
    const bool last = phase_ == Phase::kStopping;
    const bool sync =
        last || sync_up_to_ > synced_ || (Clock::now() >= next_sync && !(unsynced_.empty() && items.empty()));
    lock.unlock();
    done_.notify_all();  // there is room again
    write(items);
    add_pending_records(-static_cast<int64_t>(items.size()));
    if (sync) {
      for (AppendFile* file : unsynced_) file->sync();
      unsynced_.clear();
      next_sync = Clock::now() + interval;
    }
    lock.lock();
    written_ += static_cast<int64_t>(items.size());
    items.clear();
    if (sync) synced_ = written_;
    done_.notify_all();
    if (last && waiting_.empty()) return;
  }
}

/// Neighbours that go into one file are one write(2); where the disk has no room for all, each is tried
/// alone.
void EventQueue::write(const std::vector<Item>& items) {
  RECORD_USER_SCOPE("metrics: write");
  constexpr size_t kMuch = size_t{1} << 20;
  std::string records;
  for (size_t begin = 0; begin < items.size();) {
    records.clear();
    AppendFile& file = *items[begin].file;
    size_t end = begin;
    for (; end < items.size() && items[end].file == &file && records.size() < kMuch; ++end) {
      append_record(records, items[end].event);
    }
    if (std::find(unsynced_.begin(), unsynced_.end(), &file) == unsynced_.end()) unsynced_.push_back(&file);
    int64_t lost = 0;
    if (!file.append(records)) {
      for (size_t i = begin; i < end; ++i) {
        records.clear();
        append_record(records, items[i].event);
        if (end - begin == 1 || !file.append(records)) ++lost;
      }
    }
    begin = end;
    const std::lock_guard lock(mutex_);
    lost_ += lost;
  }
}

}  // namespace lockstep::observe::internal

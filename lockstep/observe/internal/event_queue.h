#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/base/files/append_file.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>

namespace lockstep::observe::internal {

/// The thread behind a SummaryWriter: takes serialised events from callers, frames them as records, and
/// writes them into their files within milliseconds, in the order they came. A process that ends waits for it
/// (flush_at_exit.h), and one that is killed loses only what it had no time for yet. In a forked child all
/// calls do nothing. Thread-safe.
///
/// A record is (tensorboard/summary/writer/record_writer.py) the length (64 bits), the masked CRC-32C of
/// these eight bytes, the event, and its masked CRC-32C, all little-endian.
class EventQueue {
 public:
  /// At most `max_queue` events wait, or 64 MiB of them: beyond, add() waits for the thread. Every
  /// `sync_interval` what was written is forced to the disk.
  EventQueue(size_t max_queue, std::chrono::duration<double> sync_interval);
  /// Writes everything, and forces it to the disk.
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  /// `file` lives until the queue does not.
  void add(AppendFile& file, std::string event);
  /// Returns once all events that were added before are written and forced to the disk.
  void flush();
  /// Events that the disk has refused.
  int64_t lost() const;

 private:
  struct Item {
    AppendFile* file;
    std::string event;
  };

  enum class Phase : uint8_t {
    kWriting,
    kIdle,      // the thread sleeps, so it must be woken
    kStopping,  // the destructor has been called
  };

  /// Lets a thread that is idle look again. Whether it was.
  bool end_idleness();
  void run();
  bool is_full() const;
  void write(const std::vector<Item>& items);

  const size_t max_queue_;
  const std::chrono::duration<double> sync_interval_;
  ForkGuard fork_guard_;
  mutable std::mutex mutex_;
  std::condition_variable work_;  // for the thread
  std::condition_variable done_;  // for callers
  std::vector<Item> waiting_;
  size_t waiting_bytes_ = 0;
  int64_t added_ = 0;
  int64_t written_ = 0;
  int64_t synced_ = 0;  // how many of the written are on the disk
  int64_t sync_up_to_ = 0;
  int64_t lost_ = 0;
  Phase phase_ = Phase::kWriting;
  // The thread's own: what to sync. Files of a writer are few.
  std::vector<AppendFile*> unsynced_;
  BackgroundThread thread_;
};

/// `event` framed as a record, after what `to` holds already.
void append_record(std::string& to, std::string_view event);

}  // namespace lockstep::observe::internal

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace lockstep::launch {

/// What an agent knows of generations, for its host's report.
struct KnownGeneration {
  uint32_t newest = 0;  ///< that the coordinator has started; 0: none
  bool idles = false;   ///< no workers are to run here now: the next one is formed, or runs without this host
};

/// Asks for a host's report every second, on a thread of its own: what it asks may take long (a card's driver that
/// hangs), and the agent has to answer the coordinator meanwhile. Used by one thread.
class HostReporter {
 public:
  /// `report` is called by one thread at a time. It may still be under way when this object has ended. Throws where there is
  /// no descriptor or thread for it.
  explicit HostReporter(std::function<std::string()> report);
  HostReporter(const HostReporter&) = delete;
  HostReporter& operator=(const HostReporter&) = delete;
  /// Waits for the report that is under way, 2 s at most.
  ~HostReporter();

  /// Asks for no more of them, and does not wait for the one that is under way.
  void stop();
  /// Whether none is under way any more after stop().
  bool is_over() const;

  /// Readable while there is a report, and once it is over.
  int fd() const;
  /// The newest one, once.
  std::optional<std::string> take();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::launch

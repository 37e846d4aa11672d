#pragma once

#include <memory>
#include <vector>

#include <lockstep/transport/wire/engine.h>

namespace lockstep::transport::wire {

/// Engines for ranks that are threads of one process, so that ThreadSanitizer sees what is built on the wire.
/// A message is copied by the receiver's progress(); sends of up to kEagerBytes are done at once, longer ones
/// when they have been copied, so that what needs a receive to be posted is found out. Thread-safe. Engines
/// keep the hub.
class ThreadHub : public std::enable_shared_from_this<ThreadHub> {
 public:
  static constexpr size_t kEagerBytes = size_t{8} << 10;

  static std::shared_ptr<ThreadHub> make(int ranks);
  virtual ~ThreadHub() = default;

  /// Makes the engine of one rank; once for each.
  virtual std::unique_ptr<Engine> make_engine(int rank) = 0;
  /// Ends the connection between two ranks, as if the wire were cut: each loses the other.
  virtual void disconnect(int rank, int other) = 0;
  /// From now on nothing that `from` sends reaches `to`, which learns nothing of that; so does a rank that is stopped seem to
  /// the others, if it is cut off from them in both directions.
  virtual void cut(int from, int to) = 0;
  /// What was held up comes now.
  virtual void heal(int from, int to) = 0;
  /// From now on nothing that comes for `rank` wakes its threads, as if they had no processor: it stays where it is
  /// until one looks.
  virtual void let_sleep(int rank) = 0;
};

}  // namespace lockstep::transport::wire

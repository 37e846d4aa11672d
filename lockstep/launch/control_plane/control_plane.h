#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent_store.h>
#include <lockstep/launch/control_plane/host_reporter.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/tls.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/launch/membership/agent_state.h>
#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::launch {

/// Where the coordinator is, and its socket where it is here.
struct Endpoint {
  std::vector<SocketAddress> addresses;  // to connect to
  UniqueFd listener;                     // of the coordinator: listens, and does not block
  std::string caution = {};              // a warning about the address at which it listens; empty: none
  std::function<std::vector<SocketAddress>()> find = {};  // of another host: looks the addresses up again
};

/// Looks for the coordinator's place: this host is it where it can listen at host:port, an address of its own. `here`:
/// the user says whether it is. Where the port is in use, another agent of this host is the coordinator. Throws
/// c10::DistNetworkError.
Endpoint find_endpoint(const std::string& host, uint16_t port, std::optional<bool> here);

/// The thread in which an agent speaks with the other hosts: its AgentState and AgentLink, the tunnel's entrance, and on
/// the coordinator's host the CoordinatorServer and its store. The agent's main thread does what it is told by take().
/// All functions are thread-safe.
class ControlPlane {
 public:
  struct Options {
    MembershipOptions membership;
    Status self;  // its id, host, node_rank and nproc
    Endpoint endpoint;
    TlsKey key;
    /// Workers reach the coordinator's store by the tunnel; otherwise the store is open to the network, at the endpoint.
    bool tunnel = true;
    uint16_t store_port = 0;                      // 0: a free one for each store
    std::function<void(const std::string&)> say;  // is told what happens, on the thread
    /// That of all generations' workers, which find there what this host knows of generations.
    std::shared_ptr<ExitStatusTable> table = {};
    std::function<std::string(const KnownGeneration&)> report = {};  // see HostsOptions
    /// For so long an agent that is not the coordinator's has no workers before it says for what it waits, and from then on until
    /// it says so again, where that has changed.
    std::chrono::nanoseconds before_wait_is_said = std::chrono::seconds(5);
  };
  /// What the main thread is to do.
  struct Task {
    enum class Kind { kStart, kStop, kKill, kEnd } kind;
    Place place = {};                // with kStart
    std::string store_host = {};     // with kStart
    uint16_t store_port = 0;         // with kStart
    std::string local_address = {};  // with kStart: as the coordinator sees it; empty on loopback
    int exit_status = 0;             // with kEnd
  };

  explicit ControlPlane(Options options);
  ~ControlPlane();

  /// Readable while there is a task.
  int fd() const { return tasks_event_.get(); }
  std::optional<Task> take();
  /// From now on, until workers_ended(), the thread renews their guardian's lease with each message of the coordinator. Before
  /// the first worker.
  void guard(GuardianLease lease);
  /// See AgentState::workers_ended.
  void workers_ended(int exit_status, const std::string& failure, int culprit);
  void leave(int signal);
  /// Whether the workers' guardian has not heard of a longer lease in time, be it that this process was stopped meanwhile.
  bool has_lapsed();

 private:
  class Thread;
  void put(Task task);
  bool guard_has_lapsed() const;  // under the mutex

  UniqueFd tasks_event_;
  UniqueFd wake_event_;  // wakes the thread
  std::mutex mutex_;     // over what follows, up to stop_
  std::deque<Task> tasks_;
  struct WorkersEnd {
    int exit_status;
    std::string failure;
    int culprit;
  };
  std::optional<WorkersEnd> ended_;
  int leaving_ = 0;
  std::optional<GuardianLease> guard_;  // while there are workers
  BootTime lease_until_ = {};           // as the coordinator's last message allows
  std::atomic<bool> stop_{false};
  BackgroundThread thread_;
};

}  // namespace lockstep::launch

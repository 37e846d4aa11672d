#include <algorithm>
#include <fcntl.h>
#include <fstream>
#include <mutex>
#include <sys/stat.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/standard_streams.h>
#include <lockstep/base/ranks.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/generation.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/internal/file_store.h>
#include <lockstep/rendezvous/internal/job_file.h>
#include <lockstep/rendezvous/internal/plan.h>
#include <lockstep/rendezvous/internal/sockets.h>
#include <lockstep/rendezvous/internal/store_cache.h>
#include <lockstep/rendezvous/internal/tcp_store.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/rendezvous/store_all_gather.h>

namespace lockstep {
namespace {

using namespace rendezvous_internal;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Entry = StoreCache::Entry;

/// What every way of meeting needs to know.
struct Call {
  int rank;
  int world_size;
  bool peers_are_local;  ///< a launcher says that all processes of the job are on this host
  std::chrono::milliseconds timeout;
  Deadline deadline;
};

/// A store to gather at.
struct Place {
  std::shared_ptr<Entry> entry;  ///< none for a process that is alone
  StorePtr store;
  std::string job = "none";            ///< sets jobs that use one store apart
  std::shared_ptr<void> until_joined;  ///< dropped once all ranks have come, or can't any more
};

/// The program as it was typed, for an error that shows how to start it.
std::string program_name() {
  std::string name;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::getline(file, name, '\0');
  return name.empty() ? "./program" : name;
}

/// Takes the entry's store, or has it made.
template <typename Open>
Place open_place(std::shared_ptr<Entry> entry, Open open) {
  std::lock_guard lock(entry->opening);
  if (!entry->store) entry->store = open();
  return Place{.entry = entry, .store = entry->store, .job = "none", .until_joined = nullptr};
}

Place meet(const Alone&, const Call&) {
  return Place{
      .entry = nullptr, .store = c10::make_intrusive<c10d::HashStore>(), .job = "none", .until_joined = {}};
}

Place meet(const TcpMeeting& meeting, const Call& call) {
  auto address = c10::str("tcp://", meeting.host, ":", meeting.port);
  auto place = open_place(StoreCache::instance().entry(address, call.rank), [&]() -> StorePtr {
    if (call.rank == 0 && !meeting.agent_hosts) {
      try {
        return host_store(listen_at(meeting.host, meeting.port, call.peers_are_local), call.timeout,
                          call.deadline);
      } catch (const c10::DistNetworkError& error) {
        if (!meeting.port_derived) throw;
        C10_THROW_ERROR(DistNetworkError,
                        c10::str(text_of(error), ". The port was derived from the Slurm job and step; ",
                                 "set MASTER_PORT to choose one"));
      }
    }
    auto where = [&] { return HostPort{.host = meeting.host, .port = meeting.port}; };
    return join_store(where, "", meeting.agent_hosts ? "the launcher's agent" : "rank 0", call.rank,
                      call.timeout, call.deadline);
  });
  place.job = c10::str(meeting.run_id, "/attempt_", meeting.attempt);
  return place;
}

Place meet(const JobMeeting& meeting, const Call& call) {
  auto file = JobFile::of_job(meeting.job);
  std::shared_ptr<void> until_joined;
  auto place = open_place(StoreCache::instance().entry("job " + file.path(), call.rank), [&]() -> StorePtr {
    if (call.rank == 0) {
      auto listener = listen_at("127.0.0.1", 0, /*peers_are_local=*/true);
      auto port = listener.port;
      auto store = host_store(std::move(listener), call.timeout, call.deadline);
      file.publish(port);
      until_joined = std::shared_ptr<void>(nullptr, [file](void*) { file.remove(); });
      return store;
    }
    auto where = [&]() -> std::optional<HostPort> {
      auto port = file.read();
      return port ? std::optional(HostPort{.host = "127.0.0.1", .port = *port}) : std::nullopt;
    };
    return join_store(where, "rank 0 has not written " + file.path(), "rank 0", call.rank, call.timeout,
                      call.deadline);
  });
  place.until_joined = std::move(until_joined);
  return place;
}

/// Whether `path` still is the open file.
bool is_same_file(const UniqueFd& file, const std::string& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(file.get(), &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

Place meet(const FileMeeting& meeting, const Call& call) {
  check_store_file(meeting.path);
  auto entry = StoreCache::instance().entry("file://" + meeting.path, call.rank);
  {
    std::lock_guard lock(entry->opening);
    // The file was deleted since the last time: what the store remembers of it is worthless. It is leaked,
    // because its destructor would sign this process off in the file that a peer may have made anew.
    if (entry->store && !is_same_file(entry->file, meeting.path)) entry->store.release();
  }
  return open_place(entry, [&]() -> StorePtr {
    auto store = open_file_store(meeting.path, call.world_size, call.timeout, call.deadline);
    entry->file.reset(::open(meeting.path.c_str(), O_RDONLY | O_CLOEXEC));
    return store;
  });
}

Place meet(const NoMeeting& meeting, const Call&) {
  TORCH_CHECK(false, meeting.reason);
}

Place meet_at(const StorePtr& given, const Call& call) {
  return Place{.entry = StoreCache::instance().entry(given, call.rank),
               .store = given,
               .job = "none",
               .until_joined = {}};
}

constexpr const char* kJoin = "join";

/// What rendezvous() gives back of the store.
struct Joined {
  StorePtr store;
  Topology topology;
};

/// By rank, as the ranks published it.
Topology topology_of(const std::vector<std::string>& published, int rank) {
  std::vector<HostIdentity> identities;
  identities.reserve(published.size());
  for (const auto& text : published) identities.push_back(HostIdentity::parse(text));
  return Topology::make(identities, rank);
}

/// Gives this initialisation keys of its own, calls the roll, and learns on which hosts the ranks are.
Joined join(const Place& place, const Call& call) {
  const std::string own = this_host().to_string();
  if (!place.entry) {
    return {c10::make_intrusive<c10d::PrefixStore>("lockstep", place.store), topology_of({own}, 0)};
  }
  int64_t number = 0;
  {
    std::lock_guard lock(place.entry->opening);
    number = place.entry->joined;
  }
  auto prefix = c10::str("lockstep/", place.job, "/init_", number);
  auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, place.store);
  std::vector<std::string> published;
  try {
    published = store_all_gather(*store, kJoin, call.rank, call.world_size, own, call.deadline);
  } catch (const c10::DistStoreError&) {
    // The connection may be dead; a further call shall make a new one. A server stays: others may be
    // connected to it.
    std::lock_guard lock(place.entry->opening);
    if (call.rank != 0 && place.entry->store == place.store) place.entry->store.reset();
    throw;
  }
  {
    std::lock_guard lock(place.entry->opening);
    place.entry->joined = number + 1;
  }
  return {store, topology_of(published, call.rank)};
}

std::string meeting_host_of(const RendezvousPlan& plan, const RendezvousOptions& options) {
  if (options.store) return "";
  if (const auto* tcp = std::get_if<TcpMeeting>(&plan.meeting)) return tcp->host;
  return std::holds_alternative<JobMeeting>(plan.meeting) ? "127.0.0.1" : "";
}

/// A launcher that starts each process in a container of its own counts the processes of the machine. One
/// that counts fewer than there are is one of several on this host, as in tests: that costs nothing.
void warn_of_containers(const Topology& topology, int launched_here) {
  if (topology.local_rank() != 0 || launched_here <= topology.local_world_size()) return;
  if (this_host().is_pretended()) return;
  LOCKSTEP_LOG(kWarning) << "the launcher says that " << launched_here << " ranks are on this host, but only "
                         << name_ranks(topology.neighbours())
                         << " can share memory: the others are in containers with network, process or user "
                         << "namespaces of their own, and are reached through the network. Start one "
                         << "container for all ranks of a host";
}

/// As the process was started with, whatever setenv(3) has changed since; nothing where that can't be read.
std::optional<std::string> environment_at_start(const char* name) {
  std::ifstream file("/proc/self/environ");
  const std::string prefix = std::string(name) + "=";
  for (std::string entry; std::getline(file, entry, '\0');) {
    if (entry.starts_with(prefix)) return entry.substr(prefix.size());
  }
  return std::nullopt;
}

}  // namespace

World rendezvous(const RendezvousOptions& options) {
  open_standard_streams();
  auto environment = read_launch_environment(environment::text, environment_at_start);
  auto plan = make_plan(options, environment, program_name());
  if (plan.world_size > 1) {
    const auto objection = objection_to_old_generation();
    TORCH_CHECK_WITH(DistBackendError, !objection, *objection);
  }
  using std::chrono::hours;
  using std::chrono::milliseconds;
  auto timeout = std::min<milliseconds>(options.timeout, hours(24 * 365));  // far from overflow
  const bool launched_together =
      environment.world_size == plan.world_size && environment.local_world_size == plan.world_size;
  Call call{.rank = plan.rank,
            .world_size = plan.world_size,
            .peers_are_local = launched_together,
            .timeout = timeout,
            .deadline = Deadline::after(timeout)};
  auto place = options.store
                   ? meet_at(options.store, call)
                   : std::visit([&](const auto& meeting) { return meet(meeting, call); }, plan.meeting);
  auto [store, topology] = join(place, call);
  const auto or_else = [](int launched, int found) { return launched >= 0 ? launched : found; };
  log::set_rank(plan.rank);
  World world{.rank = plan.rank,
              .world_size = plan.world_size,
              .local_rank = or_else(environment.local_rank, topology.local_rank()),
              .local_world_size = or_else(environment.local_world_size, topology.local_world_size()),
              .topology = topology,
              .meeting_host = meeting_host_of(plan, options),
              .store = store,
              .met_at = kJoin,
              .launcher = environment.launcher};
  if (environment.world_size == plan.world_size) {
    warn_of_containers(world.topology, environment.local_world_size);
  }
  LOCKSTEP_LOG(kInfo) << "all " << world.world_size << " ranks are there, started by " << world.launcher
                      << ", on " << world.topology.describe();
  return world;
}

}  // namespace lockstep

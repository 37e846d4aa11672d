#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <set>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/launch/control_plane/agent_link.h>
#include <lockstep/launch/control_plane/control_plane.h>
#include <lockstep/launch/control_plane/coordinator_server.h>
#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/host_reporter.h>
#include <lockstep/launch/control_plane/tunnel_entrance.h>
#include <lockstep/launch/control_plane/watch_server.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/port_range.h>

namespace lockstep::launch {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

/// An agent repeats for what it waits after so long, where the reason stays the same.
constexpr std::chrono::minutes kBeforeWaitIsRepeated{5};

/// The same for all hosts, as they understand it: no name that a host maps to loopback for itself alone.
bool means_loopback(const std::string& host) {
  return host == "localhost" || host.starts_with("127.") || host == "::1";
}

void clear_event(const UniqueFd& event) {
  eventfd_t ignored = 0;
  ::eventfd_read(event.get(), &ignored);
}

UniqueFd make_event() {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  TORCH_CHECK_WITH(DistBackendError, static_cast<bool>(event), "eventfd: ", std::strerror(errno));
  return event;
}

/// What the user should know of a coordinator that listens at `bound`. `named` is where the user wants it, if that is elsewhere.
std::string caution_of(const SocketAddress& bound, const std::string& named) {
  const std::string place = bound.text() + " port " + std::to_string(bound.port());
  if (!named.empty()) {
    return "this host has no address of " + named + ", and awaits the others at " + place +
           ": right where that one is forwarded to it; otherwise another host is to have --node-rank 0";
  }
  if (!bound.is_loopback()) return "";
  return "only agents of this host reach the coordinator at " + place +
         "; for other hosts name an address of this one, by --master-addr or --rdzv-endpoint";
}

/// As the other hosts find them. Empty, and why, where there are none.
std::vector<SocketAddress> coordinators_addresses(const std::string& host, uint16_t port, std::string& why) {
  std::vector<SocketAddress> addresses = addresses_of(host, port, why);
  if (!addresses.empty() && addresses.front().is_loopback() && !means_loopback(host)) {
    // Debian's 127.0.1.1: it is this host's own name, under which the others find another address.
    addresses = addresses_of(interface_between_hosts("").address, port, why);
  }
  return addresses;
}

Endpoint on_another_host(std::vector<SocketAddress> addresses, const std::string& host, uint16_t port) {
  Endpoint endpoint = {.addresses = std::move(addresses), .listener = {}};
  endpoint.find = [host, port] {
    std::string ignored;
    return coordinators_addresses(host, port, ignored);
  };
  return endpoint;
}

}  // namespace

Endpoint find_endpoint(const std::string& host, uint16_t port, std::optional<bool> here) {
  std::string why;
  std::vector<SocketAddress> addresses = coordinators_addresses(host, port, why);
  TORCH_CHECK_WITH(DistNetworkError, !addresses.empty(), "can't find the coordinator's host: ", why);
  if (here == false) return on_another_host(std::move(addresses), host, port);
  std::vector<SocketAddress> candidates = addresses;
  if (here == true && !addresses.front().is_loopback()) {
    // Behind a forwarding address it listens where it reaches the other hosts.
    for (const SocketAddress& own : addresses_of(interface_between_hosts("").address, port, why))
      candidates.push_back(own);
  }
  int error = 0;
  size_t tried = 0;
  for (const SocketAddress& address : candidates) {
    // Where the port is taken at the address that is asked for, other agents would find who has it.
    if (tried++ == addresses.size() && error == EADDRINUSE) break;
    UniqueFd listener = listen_tcp(address.storage, address.size);
    if (!listener) {
      if (errno != EADDRNOTAVAIL || error == 0) error = errno;
      continue;
    }
    SocketAddress bound;
    bound.size = sizeof(bound.storage);
    TORCH_CHECK_WITH(DistNetworkError,
                     ::getsockname(listener.get(), bound.raw(), &bound.size) == 0 &&
                         ::fcntl(listener.get(), F_SETFL, O_NONBLOCK) == 0,
                     "can't listen at ", host, ":", port, ": ", std::strerror(errno));
    const auto is_same = [&](const SocketAddress& one) { return one.text() == bound.text(); };
    const bool named = std::any_of(addresses.begin(), addresses.end(), is_same);
    return {{bound}, std::move(listener), caution_of(bound, named ? "" : host)};
  }
  const bool elsewhere = error == EADDRNOTAVAIL || error == EADDRINUSE || error == EAFNOSUPPORT;
  TORCH_CHECK_WITH(DistNetworkError, here != true && elsewhere, "can't listen at ", host, ":", port, ": ",
                   std::strerror(error), error == EADDRINUSE ? "; choose another port for all hosts" : "");
  return on_another_host(std::move(addresses), host, port);
}

/// All that lives on the thread.
class ControlPlane::Thread : public EventHandler {
 public:
  Thread(ControlPlane& plane, Options options)
      : plane_(plane),
        options_(std::move(options)),
        state_(options_.self, options_.membership, BootClock::now()) {
    if (options_.endpoint.listener) {
      CoordinatorServer::Options server = {
          .membership = options_.membership, .job = random_bytes<16>(), .own = options_.self.id};
      if (!options_.tunnel) server.open_port = options_.endpoint.addresses.front().port();
      server.start_store = [this](uint64_t) {
        store_.reset();
        return store_.emplace(options_.store_port, [this] { return plane_.stop_.load(); }).port();
      };
      server.observe = [this](const MembershipDecision& decision) {
        const bool waits = decision.action == MembershipDecision::Action::kWait;
        // Before its own agent is heard there is nothing to tell.
        const bool forming = server_->coordinator().world().phase == MembershipPhase::kForming &&
                             !server_->coordinator().members().empty();
        if (decision.action != MembershipDecision::Action::kDone && (!waits || forming))
          options_.say(decision.reason);
      };
      server.report = options_.say;
      server_ = std::make_unique<CoordinatorServer>(loop_, options_.key,
                                                    std::move(options_.endpoint.listener), std::move(server));
    }
    if (options_.membership.max_hosts > 1 && !options_.endpoint.caution.empty())
      options_.say(options_.endpoint.caution);
    link_ = std::make_unique<AgentLink>(loop_, options_.key, options_.endpoint.addresses, options_.membership,
                                        state_);
    if (options_.endpoint.find) link_->set_lookup(options_.endpoint.find);
    link_->set_listener([this](const Report& report) { watchers_.send(report); });
    loop_.watch(plane_.wake_event_.get(), POLLIN, *this);
  }
  ~Thread() override {
    end_reports();
    loop_.forget(plane_.wake_event_.get());
  }

  void on_events(int fd, short) override {
    if (fd == plane_.wake_event_.get()) return clear_event(plane_.wake_event_);
    if (const auto report = reporter_ ? reporter_->take() : std::nullopt) link_->send_report(*report);
  }

  void run() {
    BootTime next = {};
    while (!plane_.stop_) {
      loop_.run_once(next);
      next = serve();
      if (state_.phase() == AgentState::Phase::kEnded && (!server_ || server_->done())) break;
    }
    if (plane_.stop_) return;
    const std::string trouble =
        state_.exit_status() == 0 || link_->trouble().empty() ? "" : " (" + link_->trouble() + ")";
    say_reason(trouble);
    const int status = server_ ? server_->exit_status() : state_.exit_status();
    plane_.put({.kind = Task::Kind::kEnd, .exit_status = status});
  }

 private:
  /// Everything that may be due; returns when to look again.
  BootTime serve() {
    const BootTime now = BootClock::now();
    const bool told = take_news(now), watches_anew = serve_watchers(now);
    BootTime next = server_ ? server_->serve(now) : BootTime::max();
    const AgentState::Phase before = state_.phase();
    const AgentState::Action action = state_.advance(now);
    if (action != AgentState::Action::kNothing) act(action);
    known_generation_->store(
        {.newest = static_cast<uint32_t>(state_.newest_generation()), .idles = state_.idles()});
    const bool news = told || watches_anew || action != AgentState::Action::kNothing ||
                      state_.phase() != before || std::exchange(order_, state_.order()) != state_.order();
    next = std::min({next, link_->serve(now, news), state_.look_again_at()});
    say_trouble();
    next = std::min({next, say_wait(now), watchers_.serve(now)});
    if (tunnel_) next = std::min(next, tunnel_->serve(now));
    return std::max(next,
                    now + std::chrono::milliseconds(1));  // what is due again at once waits for its turn
  }

  /// Whether the coordinator has to be told. This thread waits for no report: the other hosts wait for its heartbeats.
  bool serve_watchers(BootTime now) {
    const bool is_new = state_.set_watches(watchers_.watched());
    const bool wanted = state_.watched() && options_.report;
    if (!wanted && reporter_) reporter_->stop();
    if (reporter_ && reporter_->is_over()) end_reports();
    if (wanted && !reporter_ && now >= report_at_) begin_reports(now);
    return is_new;
  }
  /// Tries again later where there is no thread, descriptor or memory for it: the job needs no reports.
  void begin_reports(BootTime now) {
    try {
      reporter_ = std::make_unique<HostReporter>(
          [report = options_.report, known = known_generation_] { return report(known->load()); });
      loop_.watch(reporter_->fd(), POLLIN, *this);
    } catch (const std::exception&) {
      report_at_ = now + std::chrono::seconds(1);
      if (reporter_) reporter_->stop();
      say_once("can't tell lockstep top how this host's ranks do, and tries again: " +
               text_of(std::current_exception()));
    }
  }
  void end_reports() {
    if (!reporter_) return;
    loop_.forget(reporter_->fd());
    reporter_.reset();
  }

  /// At once, for it may be one that does not pass. The coordinator's own agent only waits for its turn.
  void say_trouble() {
    if (server_ || link_->trouble().empty()) return;
    say_once("can't reach the coordinator, and tries again: " + link_->trouble());
  }
  /// For what an agent waits that has no workers. The coordinator's says what it decides. Returns when to look again.
  BootTime say_wait(BootTime now) {
    if (server_ || state_.phase() != AgentState::Phase::kIdle) {
      look_at_wait_ = {};
      said_wait_.clear();
      return BootTime::max();
    }
    if (now < look_at_wait_) return look_at_wait_;
    const bool begins = std::exchange(look_at_wait_, now + options_.before_wait_is_said) == BootTime{};
    if (begins) return look_at_wait_;
    const std::string text = what_it_waits_for();
    // Each trouble is told by say_trouble(); with a name of several addresses, which are tried in turn, it alternates.
    const std::string what = link_->trouble().empty() ? text : "trouble";
    if (what != said_wait_ || now >= repeat_wait_at_) {
      repeat_wait_at_ = now + kBeforeWaitIsRepeated;
      said_wait_ = what;
      options_.say(text);
    }
    return look_at_wait_;
  }
  std::string what_it_waits_for() const {
    const std::string place = " the coordinator at " + link_->coordinator().text() + " port " +
                              std::to_string(link_->coordinator().port());
    if (!link_->trouble().empty()) return "waits for the coordinator: " + link_->trouble();
    if (state_.reason().empty()) return "waits for an answer of" + place;
    return "is connected to" + place + ", and waits: " + state_.reason();
  }
  /// The coordinator's agent says what it decides itself, and with -H to the same reader.
  void say_reason(const std::string& trouble) {
    const bool is_repeated = options_.membership.one_command && state_.reason_is_coordinators();
    if (!server_ && !is_repeated) options_.say(state_.reason() + trouble);
  }
  void say_once(const std::string& trouble) {
    if (troubles_.insert(trouble).second) options_.say(trouble);
  }

  bool take_news(BootTime now) {
    std::optional<WorkersEnd> ended;
    int leaving = 0;
    {
      const std::lock_guard lock(plane_.mutex_);
      ended = std::exchange(plane_.ended_, {});
      leaving = std::exchange(plane_.leaving_, 0);
      plane_.lease_until_ = state_.lease_until();
      if (options_.table)
        options_.table->record_generations({state_.newest_generation(), state_.lease_until()});
      if (plane_.guard_) {
        // Where it is over the guardian has killed the workers, be it that this process was stopped meanwhile.
        if (plane_.guard_has_lapsed()) {
          state_.lapse();
        } else {
          plane_.guard_->renew(plane_.lease_until_);
        }
      }
      if (ended) plane_.guard_.reset();
    }
    if (leaving != 0) state_.leave(leaving, now);
    if (ended) {
      state_.workers_ended(ended->exit_status, ended->failure, now, ended->culprit);
      tunnel_.reset();
    }
    return ended || leaving != 0;
  }

  void act(AgentState::Action action) {
    Task task = {.kind = action == AgentState::Action::kStart  ? Task::Kind::kStart
                         : action == AgentState::Action::kStop ? Task::Kind::kStop
                                                               : Task::Kind::kKill};
    if (action == AgentState::Action::kStart) {
      task.place = state_.place();
      if (!means_loopback(link_->local_address())) task.local_address = link_->local_address();
      task.store_host = kLoopback;
      if (task.place.store_port != 0) {
        task.store_host = link_->coordinator().text();
        task.store_port = task.place.store_port;
      } else if (server_) {
        task.store_port = server_->store_port();
      } else {
        tunnel_ = std::make_unique<TunnelEntrance>(loop_, options_.key, link_->coordinator(),
                                                   task.place.generation);
        task.store_port = tunnel_->port();
      }
    } else {
      say_reason("");
    }
    plane_.put(std::move(task));
  }

  ControlPlane& plane_;
  Options options_;
  EventLoop loop_;
  AgentState state_;
  std::optional<AgentStore> store_;
  std::unique_ptr<CoordinatorServer> server_;  // of the coordinator
  std::unique_ptr<AgentLink> link_;
  std::unique_ptr<TunnelEntrance> tunnel_;  // while workers run, but on the coordinator's host
  WatchServer watchers_{loop_, options_.say};
  std::unique_ptr<HostReporter> reporter_;  // while some host watches
  BootTime report_at_ = {};                 // at the earliest, after a failure
  std::shared_ptr<std::atomic<KnownGeneration>> known_generation_ =
      std::make_shared<std::atomic<KnownGeneration>>();  // of the reporter's thread, too, which may end later
  uint64_t order_ = 0;                                   // that the last status told of
  std::set<std::string> troubles_;                       // that were told
  BootTime look_at_wait_ = {};                           // 0: it has begun with nothing, or has workers
  BootTime repeat_wait_at_ = {};
  std::string said_wait_;
};

ControlPlane::ControlPlane(Options options) : tasks_event_(make_event()), wake_event_(make_event()) {
  auto shared = std::make_shared<Options>(std::move(options));
  const auto say = shared->say;
  thread_.start("lockstep-agent", [this, shared, say] {
    try {
      Thread(*this, std::move(*shared)).run();
    } catch (...) {
      say(text_of(std::current_exception()));
      put({.kind = Task::Kind::kKill});
      put({.kind = Task::Kind::kEnd, .exit_status = 1});
    }
  });
}

ControlPlane::~ControlPlane() {
  stop_ = true;
  ::eventfd_write(wake_event_.get(), 1);
  thread_.join();
}

void ControlPlane::put(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  ::eventfd_write(tasks_event_.get(), 1);
}

std::optional<ControlPlane::Task> ControlPlane::take() {
  const std::lock_guard lock(mutex_);
  if (tasks_.empty()) return std::nullopt;
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  if (tasks_.empty()) clear_event(tasks_event_);
  return task;
}

void ControlPlane::guard(GuardianLease lease) {
  const std::lock_guard lock(mutex_);
  guard_.emplace(std::move(lease)).renew(lease_until_);
}

bool ControlPlane::has_lapsed() {
  const std::lock_guard lock(mutex_);
  return guard_has_lapsed();
}

bool ControlPlane::guard_has_lapsed() const {
  return guard_ && BootClock::now() >= guard_->until();
}

void ControlPlane::workers_ended(int exit_status, const std::string& failure, int culprit) {
  const std::lock_guard lock(mutex_);
  ended_ = {exit_status, failure, culprit};
  ::eventfd_write(wake_event_.get(), 1);
}

void ControlPlane::leave(int signal) {
  const std::lock_guard lock(mutex_);
  leaving_ = signal;
  ::eventfd_write(wake_event_.get(), 1);
}

}  // namespace lockstep::launch

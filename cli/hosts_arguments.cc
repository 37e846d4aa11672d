#include "hosts_arguments.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <initializer_list>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <utility>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/lower_case.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/base/text/without_blanks.h>
#include <lockstep/launch/agent/dry_run.h>
#include <lockstep/launch/agent/host_roles.h>
#include <lockstep/launch/agent/shell_words.h>
#include <lockstep/launch/worker_environment.h>
#include <lockstep/rendezvous/network/port_range.h>

#ifdef LOCKSTEP_CLI_HOSTS
#include <lockstep/launch/control_plane/hosts_agent.h>

#include "top.h"
#endif

namespace lockstep::cli {
namespace {

constexpr int kMostHosts = 8192;

struct HostRange {
  int least = 1;
  int most = 1;
};

/// From "N" or "MIN:MAX".
HostRange parse_nnodes(const std::string& text) {
  const size_t colon = text.find(':');
  const auto number = [](const std::string& digits) {
    return checked_number("--nnodes", digits, 1, kMostHosts);
  };
  HostRange range;
  range.least = number(text.substr(0, colon));
  range.most = colon == std::string::npos ? range.least : number(text.substr(colon + 1));
  TORCH_CHECK_VALUE(range.least <= range.most, "--nnodes is '", text, "', and the least is above the most");
  return range;
}

std::string check_nnodes(const std::string& text) {
  try {
    parse_nnodes(text);
    return {};
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

// Of --rdzv-conf, as apply_conf() takes them.
constexpr std::array kConfKeys = {"timeout",
                                  "join_timeout",
                                  "last_call_timeout",
                                  "keep_alive_interval",
                                  "keep_alive_max_attempt",
                                  "lease",
                                  "lost_after",
                                  "rejoin_timeout",
                                  "is_host"};
// torch/distributed/elastic/rendezvous/*.py: what else its rendezvous take.
constexpr std::array kTorchsConfKeys = {
    "close_timeout", "heartbeat_timeout", "read_timeout", "store_type",   "rank",
    "protocol",      "etcd_prefix",       "ssl_cert",     "ssl_cert_key", "ca_cert"};

/// "key=value,…" of --rdzv-conf, with blanks around keys and values as torchrun takes them.
std::map<std::string, std::string> parse_conf(const std::string& text) {
  std::map<std::string, std::string> result;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t equals = item.find('=');
    TORCH_CHECK_VALUE(equals != std::string::npos && equals > 0, "--rdzv-conf has '", item,
                      "'; it takes key=value,…");
    result[std::string(without_blanks(std::string_view(item).substr(0, equals)))] =
        without_blanks(std::string_view(item).substr(equals + 1));
  }
  return result;
}

#ifdef LOCKSTEP_CLI_HOSTS

constexpr int kRdzvPort = 29400;    // torchrun's, of the c10d backend
constexpr int kMasterPort = 29500;  // and of the static one

struct HostAndPort {
  std::string host;
  int port = 0;
};

/// From "HOST", "HOST:PORT" or "[IPV6]:PORT".
HostAndPort parse_endpoint(const std::string& text, int default_port) {
  const size_t bracket = text.find(']');
  const bool numeric_v6 = text.starts_with('[') && bracket != std::string::npos;
  const size_t colon = text.find(':', numeric_v6 ? bracket : 0);
  const bool bare_v6 =
      !numeric_v6 && colon != std::string::npos && text.find(':', colon + 1) != std::string::npos;
  TORCH_CHECK_VALUE(!bare_v6 && (!numeric_v6 || colon == bracket + 1 || bracket + 1 == text.size()),
                    "--rdzv-endpoint is '", text,
                    "'; it takes HOST:PORT, and an IPv6 address in brackets: [ADDRESS]:PORT");
  HostAndPort result = {.host = numeric_v6 ? text.substr(1, bracket - 1) : text.substr(0, colon),
                        .port = default_port};
  if (colon != std::string::npos) {
    result.port = checked_number("--rdzv-endpoint", text.substr(colon + 1), 0, 65535);
  }
  TORCH_CHECK_VALUE(!result.host.empty(), "--rdzv-endpoint is '", text, "', and lacks the host");
  return result;
}

std::chrono::nanoseconds parse_seconds(const std::string& key, const std::string& value) {
  double seconds = 0;
  const bool good =
      CLI::detail::lexical_cast(value, seconds) && std::isfinite(seconds) && seconds >= 0 && seconds < 1e6;
  TORCH_CHECK_VALUE(good, "--rdzv-conf: ", key, " is '", value, "'; it takes seconds");
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

/// torch/distributed/elastic/rendezvous/api.py: get_as_bool.
bool parse_flag(const std::string& key, const std::string& value) {
  const std::string small = lower_case(value);
  const auto is_one_of = [&](std::initializer_list<const char*> words) {
    return std::find(words.begin(), words.end(), small) != words.end();
  };
  if (is_one_of({"1", "true", "t", "yes", "y"})) return true;
  TORCH_CHECK_VALUE(is_one_of({"0", "false", "f", "no", "n"}), "--rdzv-conf: ", key, " is '", value,
                    "'; it takes true or false");
  return false;
}

/// torchrun's keys, and those that are ours alone: lease, lost_after, rejoin_timeout. Where the first two are not given,
/// they follow from torchrun's: a host is cut off when keep_alive_max_attempt of its heartbeats, 3 or more, have not come.
void apply_conf(const std::string& text, launch::HostsOptions& options) {
  launch::MembershipOptions& membership = options.membership;
  const std::map<std::string, std::chrono::nanoseconds*> durations = {
      {"timeout", &membership.join_timeout},
      {"join_timeout", &membership.join_timeout},
      {"last_call_timeout", &membership.last_call},
      {"keep_alive_interval", &membership.heartbeat_interval},
      {"lease", &membership.lease},
      {"lost_after", &membership.lost_after},
      {"rejoin_timeout", &membership.rejoin_timeout}};
  const auto given = parse_conf(text);
  for (const auto& [key, value] : given) {
    const auto duration = durations.find(key);
    if (duration != durations.end()) {
      *duration->second = parse_seconds(key, value);
    } else if (key == "is_host") {
      options.coordinates = parse_flag(key, value);
    }
  }
  const auto attempts = given.find("keep_alive_max_attempt");
  const int number = attempts == given.end() ? 3 : checked_number("--rdzv-conf", attempts->second, 1, 100);
  const auto longest = membership.heartbeat_interval * std::max(number, 3);
  if (given.count("lease") == 0) {
    membership.lease = attempts == given.end() ? std::max(membership.lease, longest) : longest;
  }
  if (given.count("lost_after") == 0) {
    membership.lost_after =
        std::max(membership.lease * 5 / 4, membership.lease * 23 / 20 + std::chrono::milliseconds(500));
  }
}

/// As launch::read_secret(), after a warning where other users of this host can read the file, or write another secret into
/// it. No more than that: Kubernetes, for one, mounts secrets as 0644, in a container without other users.
std::string read_secret(const std::string& file) {
  struct stat found = {};
  constexpr mode_t kByOthers = S_IRGRP | S_IWGRP | S_IROTH | S_IWOTH;
  if (::stat(file.c_str(), &found) == 0 && S_ISREG(found.st_mode) && (found.st_mode & kByOthers) != 0) {
    std::ostringstream mode;
    mode << std::oct << (found.st_mode & 07777);
    std::cerr << "lockstep run: WARNING: the file of the secret, " + file + ", has mode 0" + mode.str() +
                     ", so other users of this host may take part in the job; chmod 600 " +
                     launch::shell_words({file}) + "\n"
              << std::flush;
  }
  return launch::read_secret(file);
}

launch::HostsOptions hosts_options(const HostsArguments& arguments, const launch::RunOptions& run) {
  const HostRange hosts = arguments.standalone ? HostRange{} : parse_nnodes(arguments.nnodes);
  launch::HostsOptions options = {.run = run};
  options.membership.min_hosts = hosts.least;
  options.membership.max_hosts = hosts.most;
  options.membership.max_restarts = arguments.max_restarts;
  options.membership.one_command = arguments.started_by_shell;
  options.job_id = arguments.rdzv_id;
  options.node_rank = arguments.node_rank;
  options.local_address = arguments.local_addr;
  options.tunnel = !arguments.no_tunnel;
  HostAndPort endpoint;
  if (hosts.most == 1) {
    endpoint = {.host = "127.0.0.1", .port = 0};
    options.coordinates = true;
    options.node_rank = -1;
    options.secret = launch::make_secret();  // no other host takes part
    options.job_id = run.run_id.empty() ? launch::make_run_id() : run.run_id;
  } else if (arguments.rdzv_backend == "c10d") {
    TORCH_CHECK_VALUE(!arguments.rdzv_endpoint.empty(),
                      "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, an address of one of the hosts");
    endpoint = parse_endpoint(arguments.rdzv_endpoint, kRdzvPort);
    options.node_rank = -1;
  } else {
    TORCH_CHECK_VALUE(hosts.least == hosts.most, "--nnodes ", arguments.nnodes, " needs --rdzv-backend c10d");
    if (options.node_rank < 0) options.node_rank = 0;
    TORCH_CHECK_VALUE(options.node_rank < hosts.most, "--node-rank is ", options.node_rank,
                      ", and with --nnodes ", hosts.most, " it lies in 0 to ", hosts.most - 1);
    const int port = arguments.master_port == 0 ? kMasterPort : arguments.master_port;
    std::string master = arguments.master_addr;
    if (master.starts_with('[') && master.ends_with(']')) master = master.substr(1, master.size() - 2);
    endpoint = arguments.rdzv_endpoint.empty() ? HostAndPort{master, port}
                                               : parse_endpoint(arguments.rdzv_endpoint, port);
    options.coordinates = options.node_rank == 0;
  }
  TORCH_CHECK_VALUE(endpoint.port != 0 || options.secret.size() > 0,
                    "the endpoint needs a port that all hosts know");
  options.endpoint_host = endpoint.host;
  options.endpoint_port = static_cast<uint16_t>(endpoint.port);
  apply_conf(arguments.rdzv_conf, options);
  if (hosts.most == 1) {
    // There is no other host that could take the workers for ended, be this process stopped for as long as it may.
    options.membership.lease = std::chrono::hours(24 * 365);
    options.membership.lost_after = 2 * options.membership.lease;
  }
  if (options.secret.empty()) options.secret = read_secret(arguments.secret_file);
  return options;
}

/// For --dry-run. Returns the name of the run, empty where it is a fresh one.
std::string print_hosts(const HostsArguments& arguments, const launch::RunOptions& run) {
  const launch::HostsOptions options = hosts_options(arguments, run);
  const auto objection = launch::objection_to(options.membership);
  TORCH_CHECK_VALUE(!objection, *objection);
  const launch::MembershipOptions& membership = options.membership;
  std::cout << "hosts: " << membership.min_hosts;
  if (membership.max_hosts > membership.min_hosts) std::cout << " to " << membership.max_hosts;
  if (membership.max_hosts == 1) {
    std::cout << "\nrestarts: " << membership.max_restarts << '\n';
    return run.run_id;
  }
  std::cout << "\nrestarts: " << membership.max_restarts << "\nthis host: ";
  if (options.node_rank < 0) {
    std::cout << "any number\n";
  } else {
    std::cout << "number " << options.node_rank << '\n';
  }
  std::cout << "endpoint: " << options.endpoint_host << " port " << options.endpoint_port
            << "\nsecret: " << (options.secret.empty() ? "none" : "given") << '\n';
  return options.job_id;
}

#else

std::string print_hosts(const HostsArguments& arguments, const launch::RunOptions& run) {
  run_on_hosts(arguments, run);  // throws
  return {};
}

#endif

}  // namespace

int checked_number(const std::string& option, const std::string& text, int low, int high) {
  const auto number = parse_number<int>(text);
  TORCH_CHECK_VALUE(number && *number >= low && *number <= high, option, " has '", text,
                    "', and takes a number from ", low, " to ", high);
  return *number;
}

void add_hosts_arguments(CLI::App& command, HostsArguments& arguments) {
  command.add_option("--nnodes", arguments.nnodes, "Hosts: a number, or from MIN to MAX of them")
      ->envname("PET_NNODES")
      ->type_name("N|MIN:MAX")
      ->check(check_nnodes)
      ->capture_default_str();
  command
      .add_option("--node-rank,--node_rank", arguments.node_rank,
                  "This host's number, from 0, with --rdzv-backend static")
      ->envname("PET_NODE_RANK")
      ->type_name("N")
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--rdzv-backend,--rdzv_backend", arguments.rdzv_backend,
                  "static (host 0 is at --master-addr) or c10d (hosts meet at --rdzv-endpoint)")
      ->envname("PET_RDZV_BACKEND")
      ->check(CLI::IsMember({"static", "c10d"}))
      ->capture_default_str();
  command
      .add_option("--rdzv-endpoint,--rdzv_endpoint", arguments.rdzv_endpoint,
                  "Where hosts meet: an address of one of them")
      ->envname("PET_RDZV_ENDPOINT")
      ->type_name("HOST:PORT");
  command.add_option("--rdzv-id,--rdzv_id", arguments.rdzv_id, "The job's name, the same on all hosts")
      ->envname("PET_RDZV_ID")
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option("--rdzv-conf,--rdzv_conf", arguments.rdzv_conf,
                  "More: join_timeout=600,last_call_timeout=30, …")
      ->envname("PET_RDZV_CONF")
      ->type_name("KEY=VALUE,…");
  command
      .add_option("--master-addr,--master_addr", arguments.master_addr,
                  "Address of host 0, with --rdzv-backend static")
      ->envname("PET_MASTER_ADDR")
      ->type_name("HOST")
      ->capture_default_str();
  command
      .add_option("--master-port,--master_port", arguments.master_port,
                  "One host: port on 127.0.0.1 where the processes meet, 0 takes a free one; several: of "
                  "host 0's agent")
      ->envname("PET_MASTER_PORT")
      ->type_name("PORT")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  command
      .add_option("--local-addr,--local_addr", arguments.local_addr,
                  "This host's address for messages of the processes, as LOCKSTEP_SOCKET_IFNAME has it")
      ->envname("PET_LOCAL_ADDR")
      ->type_name("ADDRESS");
  command.add_flag("--standalone", arguments.standalone, "One host with a store of its own")
      ->envname("PET_STANDALONE");
  command
      .add_option("--max-restarts,--max_restarts", arguments.max_restarts,
                  "Times that all processes are started again after some have failed")
      ->envname("PET_MAX_RESTARTS")
      ->type_name("N")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command
      .add_option("--secret-file,--secret_file", arguments.secret_file,
                  "File with the job's secret, the same on all hosts (lockstep secret makes one); or "
                  "LOCKSTEP_JOB_SECRET")
      ->type_name("FILE");
  command.add_flag("--no-tunnel,--no_tunnel", arguments.no_tunnel,
                   "Of the coordinator: the store is open to the network at its address, as torchrun's is");
}

void take_host_roles(const CLI::App& command, HostsArguments& arguments) {
  const auto given = [&](const char* option) { return command.get_option(option)->count() > 0; };
  if (arguments.standalone || given("--node-rank") || given("--rdzv-backend") || given("--rdzv-endpoint")) {
    return;
  }
  launch::GivenRoles known;
  if (given("--nnodes")) known.nnodes = parse_nnodes(arguments.nnodes).most;
  if (given("--master-addr")) known.master_addr = arguments.master_addr;
  const auto roles = launch::read_host_roles(environment::text, known);
  if (!roles) return;
  std::ostringstream taken;
  const auto take = [&](const char* option, auto& argument, const auto& value) {
    if (given(option)) return;
    argument = value;
    taken << option << ' ' << value << ' ';
  };
  take("--nnodes", arguments.nnodes, std::to_string(roles->nnodes));
  take("--node-rank", arguments.node_rank, roles->node_rank);
  take("--master-addr", arguments.master_addr, roles->master_addr);
  if (roles->master_port != 0) take("--master-port", arguments.master_port, roles->master_port);
  if (!roles->job_id.empty()) take("--rdzv-id", arguments.rdzv_id, roles->job_id);
  // In one piece: under mpirun the agents of several hosts write to one stream.
  std::cerr << "lockstep run: " + taken.str() + "by " + roles->source +
                   "; --standalone runs a job of this host alone\n"
            << std::flush;
}

void tell_of_unused_conf(const HostsArguments& arguments) {
  if (arguments.started_by_shell) return;  // the command that has started it does
  const auto is_among = [](const auto& keys, const std::string& key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  };
  for (const auto& [key, value] : parse_conf(arguments.rdzv_conf)) {
    if (is_among(kConfKeys, key)) continue;
    const std::string entry = key + "=" + value;
    if (is_among(kTorchsConfKeys, key)) {
      std::cerr << "lockstep run: --rdzv-conf: " + entry + " is for torchrun, and changes nothing here\n";
    } else {
      // torchrun ignores keys that its backend does not know.
      std::cerr << "lockstep run: WARNING: --rdzv-conf has no key " + key + ", so the job starts without " +
                       entry + "; its keys are " + c10::Join(", ", kConfKeys) + "\n";
    }
  }
}

bool is_one_host(const HostsArguments& arguments) {
  return (arguments.standalone || parse_nnodes(arguments.nnodes).most == 1) && arguments.max_restarts == 0;
}

void print_dry_run(const HostsArguments& arguments, const launch::RunOptions& options) {
  launch::RankVariables variables = {.nprocs = options.nprocs,
                                     .world_size = options.nprocs,
                                     .role_world_size = options.nprocs,
                                     .store_port = options.master_port,
                                     .run_id = options.run_id,
                                     .role = options.role,
                                     .max_restarts = arguments.max_restarts};
  const bool hosts_meet = !arguments.standalone && parse_nnodes(arguments.nnodes).most > 1;
  if (is_one_host(arguments)) {
    std::cout << "hosts: 1\n";
  } else {
    variables.run_id = print_hosts(arguments, options);
  }
  std::cout << launch::describe_workers(options, variables, hosts_meet) << std::flush;
}

#ifdef LOCKSTEP_CLI_HOSTS

int run_on_hosts(const HostsArguments& arguments, const launch::RunOptions& options) {
  launch::HostsOptions all = hosts_options(arguments, options);
  all.report = [report = make_host_report(all.job_id)](const launch::KnownGeneration& known) {
    return report(known.newest, known.idles);
  };
  return launch::run_on_hosts(std::move(all));
}

std::vector<std::string> meeting_options(const CLI::App& command, const HostsArguments& arguments,
                                         const launch::RemoteHost& first) {
  const bool has_address = command.get_option("--master-addr")->count() > 0;
  const std::string address = has_address ? arguments.master_addr : first.address();
  const bool is_loopback = address == "localhost" || address.starts_with("127.") || address == "::1";
  TORCH_CHECK_VALUE(!is_loopback, "the other hosts of -H can't find the first one by the name ", address,
                    "; name it as they know it, or give --master-addr");
  int port = arguments.master_port;
  if (port == 0) {
    // Below Linux's ephemeral ports; drawn, so that jobs on the same hosts hardly ever want the same.
    const PortRange range = port_range().value_or(PortRange{.first = 15000, .last = 29999});
    const auto bytes = random_bytes<2>();
    port = range.first + (bytes[0] << 8 | bytes[1]) % range.count();
  }
  return {"--master-addr=" + address, "--master-port=" + std::to_string(port)};
}

std::string secret_for_agents(const HostsArguments& arguments) {
  const std::string given = read_secret(arguments.secret_file);
  return given.empty() ? launch::make_secret() : given;
}

void add_secret(CLI::App& program) {
  CLI::App* secret = program.add_subcommand("secret", "Make a secret for a job on several hosts");
  secret->footer(
      "\n(umask 077; lockstep secret > key), then the file key on all hosts: lockstep run --secret-file key "
      "…");
  secret->callback([] { std::cout << launch::make_secret() << std::endl; });
}

#else

int run_on_hosts(const HostsArguments&, const launch::RunOptions&) {
  TORCH_CHECK_VALUE(
      false,
      "--nnodes above 1 and --max-restarts need an agent with TLS, and this lockstep was built without "
      "OpenSSL, as the Python package's always is; build the C++ one where OpenSSL's headers are (Debian: "
      "libssl-dev), or use torchrun, srun or mpirun");
}

std::vector<std::string> meeting_options(const CLI::App&, const HostsArguments& arguments,
                                         const launch::RemoteHost&) {
  run_on_hosts(arguments, {});  // throws
  return {};
}

std::string secret_for_agents(const HostsArguments&) {
  return {};
}

void add_secret(CLI::App&) {}

#endif

}  // namespace lockstep::cli

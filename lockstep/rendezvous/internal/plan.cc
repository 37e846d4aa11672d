#include <limits>

#include <c10/util/Exception.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/rendezvous/internal/plan.h>

namespace lockstep::rendezvous_internal {
namespace {

/// A number from an init_method.
int number(const std::string& method, const std::string& what, const std::string& text, int high) {
  const auto value = parse_number<int>(text);
  TORCH_CHECK_VALUE(value && *value >= 0 && *value <= high, "init_method '", method, "': ", what, " '", text,
                    "' is not a whole number from 0 to ", high);
  return *value;
}

void parse_query(const std::string& method, const std::string& query, InitMethod& parsed) {
  size_t at = 0;
  while (at < query.size()) {
    size_t end = std::min(query.find('&', at), query.size());
    auto pair = query.substr(at, end - at);
    at = end + 1;
    if (pair.empty()) continue;
    auto equals = pair.find('=');
    auto name = pair.substr(0, equals);
    auto value = equals == std::string::npos ? std::string() : pair.substr(equals + 1);
    if (name == "rank") {
      parsed.rank = number(method, name, value, std::numeric_limits<int>::max());
    } else if (name == "world_size") {
      parsed.world_size = number(method, name, value, std::numeric_limits<int>::max());
    } else {
      // use_libuv=0|1 chooses PyTorch's server; clients of either can talk to ours.
      TORCH_CHECK_VALUE(name == "use_libuv", "init_method '", method, "': unknown parameter '", name,
                        "'; there are rank and world_size");
    }
  }
}

void parse_address(const std::string& method, const std::string& address, InitMethod& parsed) {
  auto colon = address.rfind(':');
  auto bracket = address.rfind(']');
  bool has_port = colon != std::string::npos && (bracket == std::string::npos || colon > bracket);
  TORCH_CHECK_VALUE(has_port && colon + 1 < address.size(), "init_method '", method,
                    "': port number missing; write tcp://HOST:PORT");
  parsed.host = address.substr(0, colon);
  if (parsed.host.size() > 2 && parsed.host.front() == '[' && parsed.host.back() == ']') {
    parsed.host = parsed.host.substr(1, parsed.host.size() - 2);
  } else {
    TORCH_CHECK_VALUE(parsed.host.find(':') == std::string::npos, "init_method '", method,
                      "': an IPv6 address stands in brackets, as in tcp://[::1]:29500");
  }
  TORCH_CHECK_VALUE(!parsed.host.empty(), "init_method '", method, "': host missing; write tcp://HOST:PORT");
  parsed.port = static_cast<uint16_t>(number(method, "port", address.substr(colon + 1), 65535));
}

std::string place(int rank, int world_size) {
  auto text = [](int value) { return value < 0 ? std::string("?") : std::to_string(value); };
  return "rank " + text(rank) + " of " + text(world_size);
}

/// The option must not say something else than the environment does: one of the two is a mistake, and a
/// process that trains alone, or under another rank, would be a silent one.
int reconcile(const char* name, int option, int in_environment, const LaunchEnvironment& environment) {
  TORCH_CHECK_VALUE(
      option < 0 || in_environment < 0 || option == in_environment, "the options say ", name, " ", option,
      ", but this process was started by ", environment.launcher, " as ",
      place(environment.rank, environment.world_size),
      "; leave rank and world_size out of the options (or, for a world apart from the launcher's, pass a "
      "store, or a tcp:// or file:// init_method)");
  return option >= 0 ? option : in_environment;
}

[[noreturn]] void nothing_set(const std::string& program) {
  TORCH_CHECK_VALUE(
      false, "nothing tells this process its rank and its peers: RANK, WORLD_SIZE, MASTER_ADDR and ",
      "MASTER_PORT are not set, and no launcher's variables are. Start it with\n    ",
      "lockstep run --nproc-per-node 2 ", program,
      "\nor with torchrun --no-python, mpirun or srun; or pass rank 0 and world_size 1 to run alone");
}

void check_complete(const RendezvousPlan& plan, const RendezvousOptions& options,
                    const LaunchEnvironment& environment, bool from_environment, const std::string& program) {
  if (plan.rank < 0 && plan.world_size < 0 && from_environment) nothing_set(program);
  auto missing = [&](const char* what, const char* variable) {
    if (from_environment) {
      TORCH_CHECK_VALUE(false, what, " is not known (", place(plan.rank, plan.world_size),
                        "): environment variable ", variable, " is not set; set it, or pass ", what,
                        ", or start with lockstep run --nproc-per-node 2 ", program);
    }
    TORCH_CHECK_VALUE(false, what, " parameter missing: ",
                      options.store ? "a store" : "init_method '" + options.init_method + "'", " needs ",
                      what, " in the options");
  };
  if (plan.rank < 0) missing("rank", "RANK");
  if (plan.world_size < 0) missing("world_size", "WORLD_SIZE");
  TORCH_CHECK_VALUE(plan.world_size > 0, "world_size is ", plan.world_size, "; it must be at least 1");
  TORCH_CHECK_VALUE(plan.rank < plan.world_size, "rank ", plan.rank, " is not below world_size ",
                    plan.world_size, "; ranks count from 0",
                    from_environment ? " (started by " + environment.launcher + ")" : "");
}

}  // namespace

InitMethod parse_init_method(const std::string& text) {
  InitMethod parsed;
  if (text.empty()) return parsed;
  auto scheme_end = text.find("://");
  auto scheme = text.substr(0, scheme_end);
  bool known = scheme == "env" || scheme == "tcp" || scheme == "file";
  TORCH_CHECK_VALUE(scheme_end != std::string::npos && known, "init_method '", text,
                    "' is not one of env://, tcp://HOST:PORT and file:///PATH");
  auto rest = text.substr(scheme_end + 3);
  auto question = rest.find('?');
  if (question != std::string::npos) {
    parse_query(text, rest.substr(question + 1), parsed);
    rest.resize(question);
  }
  if (scheme == "tcp") {
    parsed.scheme = InitMethod::Scheme::kTcp;
    if (!rest.empty() && rest.back() == '/') rest.pop_back();
    parse_address(text, rest, parsed);
  } else if (scheme == "file") {
    parsed.scheme = InitMethod::Scheme::kFile;
    TORCH_CHECK_VALUE(!rest.empty(), "init_method '", text, "': path missing; write file:///PATH");
    TORCH_CHECK_VALUE(rest.front() == '/', "init_method '", text,
                      "': the path must begin at the root, with three slashes in all: file:///PATH");
    parsed.path = rest;
  } else {
    TORCH_CHECK_VALUE(rest.empty(), "init_method '", text,
                      "': nothing but ?rank= and ?world_size= follows env://");
  }
  return parsed;
}

RendezvousPlan make_plan(const RendezvousOptions& options, const LaunchEnvironment& environment,
                         const std::string& program) {
  TORCH_CHECK_VALUE(!options.store || options.init_method.empty(),
                    "cannot specify both init_method and store; init_method is '", options.init_method, "'");
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "timeout is ", options.timeout.count(),
                    " ms; it must be more than zero");
  TORCH_CHECK_VALUE(options.rank >= -1 && options.world_size >= -1 && options.world_size != 0,
                    "options have rank ", options.rank, " and world_size ", options.world_size,
                    "; give numbers from 0 and 1, or -1 for what the environment says");
  auto method = parse_init_method(options.init_method);
  bool in_url = method.rank >= 0 || method.world_size >= 0;
  bool in_options = options.rank >= 0 || options.world_size >= 0;
  TORCH_CHECK_VALUE(!(in_url && in_options), "init_method '", options.init_method,
                    "' has rank or world_size, and the options have them too; give them once");
  int rank = in_url ? method.rank : options.rank;
  int world_size = in_url ? method.world_size : options.world_size;

  bool from_environment = !options.store && method.scheme == InitMethod::Scheme::kEnvironment;
  RendezvousPlan plan{.rank = rank, .world_size = world_size, .meeting = environment.meeting};
  if (from_environment) {
    plan.rank = reconcile("rank", rank, environment.rank, environment);
    plan.world_size = reconcile("world_size", world_size, environment.world_size, environment);
  } else if (method.scheme == InitMethod::Scheme::kTcp) {
    plan.meeting = TcpMeeting{.host = method.host, .port = method.port};
  } else if (method.scheme == InitMethod::Scheme::kFile) {
    plan.meeting = FileMeeting{.path = method.path};
  }
  check_complete(plan, options, environment, from_environment, program);
  if (options.store) return plan;

  // A world of one needs an address only if it was given one.
  bool explicitly_alone = from_environment && rank == 0 && world_size == 1;
  bool no_address =
      std::holds_alternative<NoMeeting>(plan.meeting) || std::holds_alternative<JobMeeting>(plan.meeting);
  if (plan.world_size == 1 && (explicitly_alone || no_address)) plan.meeting = Alone{};
  if (auto* none = std::get_if<NoMeeting>(&plan.meeting)) {
    TORCH_CHECK_VALUE(false, place(plan.rank, plan.world_size),
                      " does not know where to meet the others: ", none->reason,
                      ". Or start with lockstep run --nproc-per-node 2 ", program);
  }
  if (auto* tcp = std::get_if<TcpMeeting>(&plan.meeting)) {
    TORCH_CHECK_VALUE(
        tcp->port != 0 || (plan.world_size == 1 && !tcp->agent_hosts),
        "the port to meet at is 0, which means any free one, and the others could not know it; give a "
        "number from 1 to 65535 (MASTER_PORT, or tcp://HOST:PORT)");
  }
  return plan;
}

}  // namespace lockstep::rendezvous_internal

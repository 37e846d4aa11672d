#include "run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <signal.h>
#include <sstream>
#include <stdlib.h>
#include <string>
#include <sys/prctl.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/log_without_waiting.h>
#include <lockstep/launch/agent/remote_hosts.h>
#include <lockstep/launch/agent/shell_words.h>
#include <lockstep/launch/worker_environment.h>

#include "cores.h"
#include "hosts_arguments.h"

namespace lockstep::cli {
namespace {

constexpr const char* kRunExamples = R"(
Examples:
  lockstep run --nproc-per-node 2 ./train --epochs 5    two processes on this machine
  lockstep run --nproc-per-node auto ./train            one for each GPU, or else for each core
  lockstep run --nproc-per-node 2 train.py              a Python script, or -m and a module
  lockstep run --nproc-per-node 2 bash train.sh         any program that reads torchrun's environment
  lockstep run -n 2 -- ./train                          the same option as mpirun has it
  lockstep run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node-a:29400 --secret-file key -n 2 ./train
                                                        on two hosts, the same line on each
  lockstep run -H node-a:2,node-b:2 ./train             on two hosts, started by ssh

Options for lockstep run stand before PROGRAM; everything after it belongs to the program.
Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of torchrun's
variables. When one fails, the others are ended. A second Ctrl-C kills.
Exit status: 0 all processes ended with 0; 1 one has failed; 2 the command line is wrong, and nothing was
started; 75 all ended with 75, which asks for another start; 128 and the number of the signal that ended
the job, 130 with Ctrl-C. docs/troubleshooting.md says what messages mean, and what to do.)";

class StarterFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* command, std::string) const override {
    return "Usage: lockstep " + command->get_name() + " [OPTIONS] PROGRAM [ARGS...]\n";
  }
};

constexpr int64_t kLongestGrace = 86400;  // seconds

struct RunArguments {
  std::string nproc_per_node = "1";
  HostsArguments hosts;
  bool module = false;
  bool run_path = false;
  bool no_python = false;
  std::string log_dir;
  std::string redirects = "0";
  std::string tee = "0";
  std::string shown_ranks;
  std::string role = "default";
  std::string signals_to_handle = launch::RunOptions().signals_to_handle;
  std::string start_method = "forkserver";
  RemoteHostsArguments remote;
  int parent_pid = 0;
  std::string cpu_list;
  std::string gpu_list;
  std::string numa_binding;
  bool virtual_local_rank = false;
  std::array<std::string, 2> filters;
  bool no_prefix = false;
  double grace_period = 30;
  bool dry_run = false;
};

/// For a program that starts `lockstep run` and must not leave it behind: kills this process when that parent ends, and undoes
/// what it had blocked. Done here, the parent need run nothing between fork and exec, which lets CPython use vfork.
void end_with_parent(int parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) {  // it has ended already, so that no signal will come
    std::cerr << "lockstep run: process " << parent
              << " of --parent-pid has ended, or is not the one that has started this program" << std::endl;
    ::_exit(1);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
}

/// A Python program's command, as torchrun makes it; of any other program its own words.
std::vector<std::string> command_from(const RunArguments& arguments, std::vector<std::string> words) {
  TORCH_CHECK_VALUE(!arguments.no_python || !arguments.module,
                    "--no-python and --module contradict each other");
  std::error_code ignored;
  const bool script =
      words.front().ends_with(".py") && std::filesystem::is_regular_file(words.front(), ignored);
  if (!arguments.module && !arguments.run_path && (arguments.no_python || !script)) return words;
  std::vector<std::string> start = {environment::text("PYTHON_EXEC").value_or("python3"), "-u"};
  if (arguments.module) start.push_back("-m");
  words.insert(words.begin(), start.begin(), start.end());
  return words;
}

/// torchrun's list of texts: a comma that belongs to one is doubled.
std::vector<std::string> comma_separated(const std::string& list) {
  std::vector<std::string> texts;
  if (list.empty()) return texts;
  texts.emplace_back();
  for (size_t i = 0; i < list.size(); ++i) {
    const bool doubled = list.compare(i, 2, ",,") == 0;
    if (list[i] == ',' && !doubled) {
      texts.emplace_back();
      continue;
    }
    texts.back() += list[i];
    if (doubled) ++i;
  }
  return texts;
}

launch::RunOptions options_from(const RunArguments& arguments, const std::vector<std::string>& words) {
  launch::RunOptions options;
  options.nprocs = launch::parse_nprocs(arguments.nproc_per_node);
  options.command = command_from(arguments, words);
  options.role = arguments.role;
  options.signals_to_handle = arguments.signals_to_handle;
  options.forks_workers = arguments.start_method != "spawn";
  options.virtual_local_rank = arguments.virtual_local_rank;
  for (size_t i = 0; i < options.filters.size(); ++i)
    options.filters[i] = comma_separated(arguments.filters[i]);
  if (arguments.hosts.rdzv_id != kNoRunId) options.run_id = arguments.hosts.rdzv_id;
  options.redirects = launch::StreamChoice::parse("--redirects", arguments.redirects);
  options.tee = launch::StreamChoice::parse("--tee", arguments.tee);
  std::istringstream shown(arguments.shown_ranks);
  for (std::string rank; std::getline(shown, rank, ',');) {
    options.shown_ranks.insert(
        checked_number("--local-ranks-filter", rank, 0, std::numeric_limits<int>::max()));
  }
  options.master_port = arguments.hosts.master_port;
  options.prefix = !arguments.no_prefix;
  options.grace_period = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(arguments.grace_period));
  options = launch::checked_options(std::move(options));
  if (arguments.dry_run) return options;
  if (!arguments.numa_binding.empty())
    options.cores = cores_near_cards(arguments.numa_binding, options.nprocs);
  const bool filtered = !options.filters[0].empty() || !options.filters[1].empty();
  if (!arguments.log_dir.empty() || !options.redirects.empty() || !options.tee.empty() || filtered) {
    options.log_folder = launch::make_log_folder(arguments.log_dir, arguments.hosts.rdzv_id);
    std::cerr << "lockstep run: what the processes write is kept in " << options.log_folder << std::endl;
  }
  return options;
}

/// torchrun has another variable for it, too.
void take_torchs_grace_period(const CLI::App& command, RunArguments& arguments) {
  if (command.get_option("--grace-period")->count() > 0) return;
  const auto seconds = environment::integer("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 0, kLongestGrace);
  if (seconds) arguments.grace_period = static_cast<double>(*seconds);
}

/// "NAME=value" of what the processes of -H get of this one's environment.
std::vector<std::string> passed_variables(const std::vector<std::string>& passed_on) {
  std::vector<std::string> result;
  const auto here = launch::WorkerEnvironment::inherited();
  for (const auto& [name, value] : here.variables()) {
    const auto begins = [&name = name](const char* start) { return name.starts_with(start); };
    const auto kinds = {"LOCKSTEP_", "UCX_", "NCCL_", "OMP_", "TORCH_"};
    if (std::any_of(kinds.begin(), kinds.end(), begins)) result.push_back(name + "=" + value);
  }
  for (const std::string& given : passed_on) {
    const bool has_value = given.find('=') != std::string::npos;
    const auto value = has_value ? std::nullopt : environment::text(given.c_str());
    TORCH_CHECK_VALUE(has_value || value, "-x ", given, ": this variable is not set");
    result.push_back(has_value ? given : given + "=" + *value);
  }
  return result;
}

/// All options that an agent has to have, too, as they were given, be it by PET_….
std::vector<std::string> options_for_agents(const CLI::App& command) {
  static const std::set<std::string> own = {"help",        "host",           "rsh",         "export",
                                            "dry-run",     "nproc-per-node", "secret-file", "master-addr",
                                            "master-port", "cpu-list",       "gpu-list",    "parent-pid"};
  static const std::set<std::string> contrary = {"nnodes",        "node-rank",  "rdzv-backend",
                                                 "rdzv-endpoint", "standalone", "local-addr"};
  std::vector<std::string> words;
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    const bool is_flag = option->get_items_expected_max() == 0;
    if (is_flag && !option->as<bool>()) continue;
    if (name == "nnodes" && option->results().back() == "1") continue;  // the default
    TORCH_CHECK_VALUE(contrary.count(name) == 0, "-H and --", name,
                      " contradict each other: with -H one command starts all hosts");
    if (own.count(name) != 0) continue;
    words.push_back("--" + name + (is_flag ? "" : "=" + option->results().back()));
  }
  return words;
}

/// The list of each host of -H as a word for its agent; none where the option is not given.
std::vector<std::string> lists_of_hosts(const CLI::App& command, const std::string& option,
                                        const std::string& text, size_t hosts) {
  std::vector<std::string> words;
  if (command.get_option(option)->count() == 0) return words;
  std::istringstream lists(text + ";");  // so that a last list may be empty
  for (std::string list; std::getline(lists, list, ';');) words.push_back(option + "=" + list);
  TORCH_CHECK_VALUE(words.size() == hosts, option, " has ", words.size(), " lists, and -H has ", hosts,
                    " hosts; give one for each, separated by ;");
  return words;
}

launch::RemoteRun remote_run(const CLI::App& command, const RunArguments& arguments,
                             const std::vector<std::string>& program) {
  const bool all_slots = command.get_option("--nproc-per-node")->count() == 0;
  const int processes = all_slots ? 0 : checked_number("-n with -H", arguments.nproc_per_node, 1, 1 << 20);
  const auto hosts = launch::parse_remote_hosts(c10::Join(",", arguments.remote.hosts), processes);
  launch::RemoteRun run;
  run.variables = passed_variables(arguments.remote.passed_on);
  run.grace_period = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(arguments.grace_period));
  std::istringstream shell(arguments.remote.shell);
  for (std::string word; shell >> word;) run.shell.push_back(word);
  TORCH_CHECK_VALUE(!run.shell.empty(), "--rsh is empty");

  std::vector<std::string> common = options_for_agents(command);
  common.push_back("--started-by-shell");
  if (hosts.size() > 1) {
    const std::vector<std::string> meeting = meeting_options(command, arguments.hosts, hosts.front());
    common.insert(common.end(), meeting.begin(), meeting.end());
    common.push_back("--nnodes=" + std::to_string(hosts.size()));
    run.secret = secret_for_agents(arguments.hosts);
  } else {
    common.push_back("--standalone");
  }
  const auto cores = lists_of_hosts(command, "--cpu-list", arguments.cpu_list, hosts.size());
  const auto cards = lists_of_hosts(command, "--gpu-list", arguments.gpu_list, hosts.size());
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  for (size_t i = 0; i < hosts.size(); ++i) {
    std::vector<std::string> words = {self, "run"};
    words.insert(words.end(), common.begin(), common.end());
    if (hosts.size() > 1) words.push_back("--node-rank=" + std::to_string(i));
    if (!cores.empty()) words.push_back(cores[i]);
    if (!cards.empty()) words.push_back(cards[i]);
    words.push_back("--nproc-per-node=" + std::to_string(hosts[i].processes));
    words.insert(words.end(), program.begin(), program.end());
    run.agents.push_back({hosts[i], std::move(words)});
  }
  return run;
}

void print_remote_run(const launch::RemoteRun& run) {
  for (const launch::RemoteRun::Agent& agent : run.agents) {
    std::cout << agent.host.name << ", " << agent.host.processes
              << (agent.host.processes == 1 ? " process: " : " processes: ")
              << launch::shell_words(launch::start_words(run, agent)) << '\n';
  }
  std::cout << "by standard input:" << (run.secret.empty() ? "" : " the secret");
  for (const std::string& variable : run.variables)
    std::cout << ' ' << variable.substr(0, variable.find('='));
  std::cout << std::endl;
}

/// Names of signals, as torchrun takes them. All that we pass on are passed on anyhow; the processes are told these.
void check_signals(const std::string& text) {
  std::istringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    const auto known = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"};
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(),
                      "--signals-to-handle: signals that are passed on are SIGTERM, SIGINT, SIGHUP, SIGQUIT "
                      "and SIGUSR1, not ",
                      name);
  }
}

/// What has no meaning here, for the sake of command lines that have it: ends are noticed at once.
void add_unused_arguments(CLI::App& run) {
  for (const char* names :
       {"--monitor-interval,--monitor_interval", "--event-log-handler,--event_log_handler"}) {
    run.add_option_function<std::string>(names, [](const std::string&) {})->group("");
  }
  run.add_flag("--use-env,--use_env")->group("");
  // Of these a program would miss the effect. Not by check(), whose errors do not name an option that no help shows.
  const auto refuse = [&run](const char* names, const char* why) {
    run.add_option_function<std::string>(names, [why](const std::string&) { TORCH_CHECK_VALUE(false, why); })
        ->group("");
  };
  refuse("--logs-specs,--logs_specs",
         "--logs-specs names a class of Python, and this launcher loads none; see --log-dir, --tee");
}

void add_arguments(CLI::App* run, const std::shared_ptr<RunArguments>& arguments) {
  // Of an option that stands twice the last one counts, as with torchrun: scripts append to a command line.
  run->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  run->add_option("--nproc-per-node,--nproc_per_node,-n,--np", arguments->nproc_per_node,
                  "Processes to start: a number, auto, cpu or gpu")
      ->envname("PET_NPROC_PER_NODE")
      ->type_name("N")
      ->capture_default_str();
  run->add_option("--grace-period,--grace_period,--shutdown-timeout,--shutdown_timeout",
                  arguments->grace_period,
                  "Seconds from the first failure or signal until what still runs is killed")
      ->envname("PET_SHUTDOWN_TIMEOUT")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.0, static_cast<double>(kLongestGrace)))
      ->capture_default_str();
  run->add_flag("-m,--module", arguments->module, "PROGRAM is a Python module, as for python -m")
      ->envname("PET_MODULE");
  run->add_flag("--no-python,--no_python", arguments->no_python,
                "Start PROGRAM itself, also where it is a Python script (.py)")
      ->envname("PET_NO_PYTHON");
  run->add_flag("--run-path,--run_path", arguments->run_path, "PROGRAM is a Python script, whatever its name")
      ->envname("PET_RUN_PATH");
  run->add_option("--log-dir,--log_dir", arguments->log_dir,
                  "Folder where each run gets one, with files of --redirects and --tee and of errors")
      ->envname("PET_LOG_DIR")
      ->type_name("FOLDER");
  run->add_option(
         "-r,--redirects", arguments->redirects,
         "What goes to files alone: 1 standard output, 2 standard error, 3 both; 0:1,1:2 by local rank")
      ->envname("PET_REDIRECTS")
      ->type_name("STREAMS")
      ->capture_default_str();
  run->add_option("-t,--tee", arguments->tee, "What goes to files too")
      ->envname("PET_TEE")
      ->type_name("STREAMS")
      ->capture_default_str();
  run->add_option("--local-ranks-filter,--local_ranks_filter", arguments->shown_ranks,
                  "Local ranks whose output is shown; files have that of all")
      ->envname("PET_LOCAL_RANKS_FILTER")
      ->type_name("RANK,…");
  for (const int stream : {1, 2}) {
    const std::string name = stream == 1 ? "stdout" : "stderr";
    run->add_option("--duplicate-" + name + "-filters,--duplicate_" + name + "_filters",
                    arguments->filters[static_cast<size_t>(stream - 1)],
                    "Lines that --tee copies from standard " + std::string(stream == 1 ? "output" : "error") +
                        " and that contain one of these go to filtered_" + name +
                        ".log of all shown ranks, too")
        ->envname(stream == 1 ? "PET_DUPLICATE_STDOUT_FILTERS" : "PET_DUPLICATE_STDERR_FILTERS")
        ->type_name("TEXT,…");
  }
  run->add_flag("--virtual-local-rank,--virtual_local_rank", arguments->virtual_local_rank,
                "Each process has LOCAL_RANK=0 and sees one GPU, that of its own local rank")
      ->envname("PET_VIRTUAL_LOCAL_RANK");
  run->add_option("--role", arguments->role, "Name of what the processes do: ROLE_NAME")
      ->envname("PET_ROLE")
      ->type_name("NAME")
      ->capture_default_str();
  run->add_option(
         "--start-method,--start_method", arguments->start_method,
         "How a program that is linked with Lockstep starts: forkserver (or fork), its libraries are loaded "
         "once for all processes of a host; spawn, by each process")
      ->envname("PET_START_METHOD")
      ->type_name("METHOD")
      ->check(CLI::IsMember({"forkserver", "fork", "spawn"}))
      ->capture_default_str();
  add_unused_arguments(*run);
  run->add_option_function<std::string>("--signals-to-handle,--signals_to_handle",
                                        [arguments](const std::string& names) {
                                          check_signals(names);
                                          arguments->signals_to_handle = names;
                                        })
      ->envname("PET_SIGNALS_TO_HANDLE")
      ->group("");
  run->add_flag("--no-prefix,--no_prefix", arguments->no_prefix, "Do not mark output lines with their rank");
  run->add_flag("--dry-run,--dry_run", arguments->dry_run,
                "Print what would run here, with which variables, and start nothing");
  run->add_option("--cpu-list,--cpu_list", arguments->cpu_list,
                  "Cores on which the processes stay, all of them on all of these: 0-3,8; with -H a list for "
                  "each host, separated by ;")
      ->type_name("CORES");
  run->add_option("--numa-binding,--numa_binding", arguments->numa_binding,
                  "Each process stays on cores near the card of its local rank: all of the NUMA node or "
                  "socket, or cores of its own there")
      ->envname("PET_NUMA_BINDING")
      ->type_name("BINDING")
      ->check(CLI::IsMember(numa_bindings()));
  run->add_option("--gpu-list,--gpu_list", arguments->gpu_list,
                  "Cards that the processes see, as CUDA_VISIBLE_DEVICES names them: 0,1; with -H a list for "
                  "each host, separated by ;")
      ->type_name("CARDS");
  add_remote_hosts_arguments(
      *run, "Hosts to run on, each with its number of processes; with it -n is that of all hosts",
      arguments->remote);
  run->add_flag("--started-by-shell", arguments->hosts.started_by_shell)->group("");
  run->add_option("--parent-pid", arguments->parent_pid)->group("");
  add_hosts_arguments(*run, arguments->hosts);
}

}  // namespace

void make_starter(CLI::App& command) {
  command.formatter(std::make_shared<StarterFormatter>());
  command.prefix_command();  // parsing stops at PROGRAM
}

std::vector<std::string> program_words(const CLI::App& command) {
  std::vector<std::string> words = command.remaining();
  if (words.empty()) throw CLI::RequiredError("PROGRAM");
  if (words.front().size() > 1 && words.front().starts_with('-')) {
    throw CLI::ExtrasError(std::vector<std::string>{words.front()});
  }
  return words;
}

void add_remote_hosts_arguments(CLI::App& command, const std::string& help_of_hosts,
                                RemoteHostsArguments& arguments) {
  const auto all = CLI::MultiOptionPolicy::TakeAll;
  command.add_option("-H,--host", arguments.hosts, help_of_hosts)
      ->type_name("HOST:SLOTS,…")
      ->multi_option_policy(all)
      ->allow_extra_args(false);
  command.add_option("--rsh", arguments.shell, "What runs a command on a host of -H")
      ->type_name("COMMAND")
      ->capture_default_str();
  command
      .add_option("-x,--export", arguments.passed_on,
                  "A variable for all processes of -H; those of LOCKSTEP_, UCX_, NCCL_, OMP_, TORCH_ go by "
                  "themselves")
      ->type_name("NAME[=VALUE]")
      ->multi_option_policy(all)
      ->allow_extra_args(false);
}

launch::RemoteRun parse_remote_run(std::vector<std::string> options,
                                   const std::vector<std::string>& program) {
  const auto arguments = std::make_shared<RunArguments>();
  CLI::App run;
  add_arguments(&run, arguments);
  std::reverse(options.begin(), options.end());  // as CLI11 takes them
  run.parse(std::move(options));
  return remote_run(run, *arguments, program);
}

void add_run(CLI::App& program, int& status) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* run =
      program.add_subcommand("run", "Start a program in several processes and see them to their end");
  make_starter(*run);
  run->footer(kRunExamples);
  add_arguments(run, arguments);
  run->callback([run, arguments, &status] {
    const std::vector<std::string> words = program_words(*run);
    if (arguments->parent_pid != 0) end_with_parent(arguments->parent_pid);
    if (arguments->hosts.started_by_shell) launch::obey_remote_launcher();
    launch::log_without_waiting();
    take_torchs_grace_period(*run, *arguments);
    tell_of_unused_conf(arguments->hosts);
    TORCH_CHECK_VALUE(!std::isnan(arguments->grace_period), "--grace-period is nan, and takes seconds");
    if (run->get_option("--host")->count() > 0) {
      const launch::RemoteRun remote = remote_run(*run, *arguments, words);
      if (arguments->dry_run) {
        print_remote_run(remote);
      } else {
        status = launch::run_on_remote_hosts(remote);
      }
      return;
    }
    TORCH_CHECK_VALUE(arguments->remote.passed_on.empty(),
                      "-x is for -H; without it the processes have the variables of this command");
    if (!arguments->cpu_list.empty()) stay_on_cores(arguments->cpu_list);
    if (run->get_option("--gpu-list")->count() > 0) {  // an empty list hides them all
      ::setenv("CUDA_VISIBLE_DEVICES", arguments->gpu_list.c_str(), 1);
    }
    take_host_roles(*run, arguments->hosts);
    const launch::RunOptions options = options_from(*arguments, words);
    if (arguments->dry_run) {
      print_dry_run(arguments->hosts, options);
      if (!arguments->numa_binding.empty())
        std::cout << "numa binding: " << arguments->numa_binding << std::endl;
      return;
    }
    status = is_one_host(arguments->hosts) ? launch::run(options) : run_on_hosts(arguments->hosts, options);
  });
}

std::vector<std::string> run_words(const CLI::App& program, std::vector<std::string> words) {
  const CLI::App* command = program.get_subcommand(words.front());
  for (size_t i = 1; i < words.size() && words[i].starts_with('-'); ++i) {
    if (words[i] == "--") {
      words.erase(words.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    if (words[i] == "-np") words[i] = "--np";
    const bool empty_value = words[i].starts_with("--") && words[i].ends_with('=');
    const std::string name = empty_value ? words[i].substr(0, words[i].size() - 1) : words[i];
    const CLI::Option* option = command->get_option_no_throw(name);
    if (option == nullptr || option->get_items_expected_max() == 0) continue;
    ++i;  // its value
    if (empty_value) {
      words[i - 1] = name;
      words.insert(words.begin() + static_cast<std::ptrdiff_t>(i), "");
    }
  }
  return words;
}

}  // namespace lockstep::cli

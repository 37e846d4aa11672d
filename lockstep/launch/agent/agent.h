#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

/// `lockstep run`: starts the processes of a job on one machine and sees them to their end.
namespace lockstep::launch {

/// Standard streams of some workers, as torchrun's --redirects and --tee name them.
class StreamChoice {
 public:
  StreamChoice() = default;
  /// From "0" to "3" for all workers (1: standard output, 2: standard error, 3: both), or "RANK:STREAMS,…" for some local
  /// ranks. Throws c10::ValueError that names the option.
  static StreamChoice parse(const std::string& option, const std::string& text);

  /// `stream`: 1 or 2.
  bool has(int local_rank, int stream) const;
  bool empty() const { return all_ == 0 && some_.empty(); }

 private:
  int all_ = 0;
  std::map<int, int> some_;
};

struct RunOptions {
  int nprocs = 1;                    // processes; see parse_nprocs
  std::vector<std::string> command;  // the program and its arguments
  std::string program = {};          // the path of command.front(); empty: find_program() tells it
  uint16_t master_port = 0;          // of the store on 127.0.0.1; 0: a free one
  bool prefix = true;                // mark output lines with "[rank N] "; a single process's never are
  bool tells_of_threads = true;      // says so where the processes get OMP_NUM_THREADS
  std::chrono::nanoseconds grace_period =
      std::chrono::seconds(30);  // from the first failure or signal to SIGKILL
  // Workers are forked from one process that has loaded their libraries, where the program is linked with this one: see
  // WorkerForks. Else each is executed.
  bool forks_workers = true;
  // Each local rank stays on its cores; where there are none, all have those of this process.
  std::vector<std::vector<int>> cores = {};
  std::string role = "default";                                     // ROLE_NAME
  std::string signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";  // TORCHELASTIC_SIGNALS_TO_HANDLE
  // Each process has LOCAL_RANK=0 and sees one GPU, as device 0: that of its local rank among those that CUDA_VISIBLE_DEVICES
  // names here.
  bool virtual_local_rank = false;
  std::string run_id = {};  // TORCHELASTIC_RUN_ID; empty: a fresh one
  // Where each start of the workers has a folder attempt_N, with RANK/error.json, stdout.log and stderr.log by local rank,
  // as torchrun has it; see make_log_folder(). Empty: nothing is kept.
  std::string log_folder = {};
  StreamChoice redirects = {};  // what goes to these files alone
  StreamChoice tee = {};        // what goes there too
  // Lines of what goes there by `tee`, of `shown_ranks` alone, that contain one of these texts go to
  // attempt_N/filtered_stdout.log, and those of standard error to filtered_stderr.log, too. Empty: no such file.
  std::array<std::vector<std::string>, 2> filters = {};
  std::set<int> shown_ranks = {};      // local ranks whose output is passed on; empty: all
  std::array<int, 2> output = {1, 2};  // descriptors for the processes' standard output and error
  // Is given what each process writes, besides: the local rank, 1 or 2 for standard output or error, and bytes
  // as they came, which need not be whole lines.
  std::function<void(int, int, std::string_view)> observe_output = {};
};

/// The number of processes that the text asks for: a number from 1; "cpu", the cores that this process may
/// use; "gpu", the CUDA devices that it sees; "auto", gpu if there are any and else cpu
/// (torch/distributed/run.py, determine_local_world_size). Throws c10::ValueError.
int parse_nprocs(const std::string& text);

/// Makes BASE/RUN_ID_XXXXXX, a new folder for RunOptions::log_folder, and what is missing above it. Empty base: in TMPDIR.
/// Throws c10::ValueError.
std::string make_log_folder(const std::string& base, const std::string& run_id);

/// These, with the program's path. Throws c10::ValueError for a program that can't be started, or a nonsensical option.
RunOptions checked_options(RunOptions options);

/// Runs the job; writes the workers' output and, when a rank failed, a report to this process's standard
/// streams. Each worker has torchrun's environment (see RankVariables), TORCHELASTIC_ERROR_FILE,
/// TORCHELASTIC_SIGNALS_TO_HANDLE, LOCKSTEP_RUN=1, LOCKSTEP_EXIT_STATUS_FD and, where the launcher's standard
/// error is a terminal, LOCKSTEP_TERMINAL_COLUMNS with the width that a progress bar may have. OMP_NUM_THREADS=1
/// when it is unset and there are several.
///
/// Standard input: rank 0 has the launcher's, unless that is a terminal (a worker's process group is never in
/// its foreground, so that reading would stop it); the others, and then rank 0 too, have /dev/null.
///
/// Returns the exit status of the launcher: 0 when all ranks ended with 0, 1 when one failed, 128 + N when
/// signal N ended the run. Throws c10::ValueError for a program that can't be started or a nonsensical option
/// (nothing is started then), c10::DistNetworkError for a port in use, c10::DistBackendError when the system
/// refuses a process. To be called by the main thread of a program that does nothing else; see Supervisor for
/// which worker is ended when.
int run(const RunOptions& options);

}  // namespace lockstep::launch

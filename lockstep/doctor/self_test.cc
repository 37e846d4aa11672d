#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <optional>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/doctor/internal/exercise.h>
#include <lockstep/doctor/self_test.h>
#include <lockstep/launch/spawn_processes.h>

namespace lockstep::doctor {

using internal::exercise_collectives;
using internal::exercise_messages;
using internal::kExerciseSizes;
using internal::TensorMemory;

namespace {

constexpr int kRanks = 2;
constexpr const char* kCheck = "self-test";

void run_rank(int rank, std::chrono::milliseconds timeout) {
  failpoint::here("doctor_self_test");
  // Before the parent kills, for then a rank says which other one it waits for.
  const auto world = init_process_group({.timeout = timeout / 2});
  for (int64_t numel : kExerciseSizes) {
    for (TensorMemory memory : {TensorMemory::kStaged, TensorMemory::kArena}) {
      exercise_collectives(numel, memory, {0, 1}, rank, {0, 1}, {});
    }
    exercise_messages(numel, rank, 1 - rank, {});
  }
}

/// Memory for what the ranks write, so that it does not mix with the report.
UniqueFd output_file() {
  UniqueFd fd(::memfd_create("doctor-output", MFD_CLOEXEC));
  if (fd) ::fcntl(fd.get(), F_SETFL, O_APPEND);  // both ranks write, each to the end
  return fd;
}

/// The last of what the ranks wrote.
std::string tail_of(const UniqueFd& fd) {
  constexpr off_t kMost = 2000;
  if (!fd) return "";
  const off_t size = ::lseek(fd.get(), 0, SEEK_END);
  std::string text(static_cast<size_t>(std::clamp<off_t>(size, 0, kMost)), '\0');
  const ssize_t got = ::pread(fd.get(), text.data(), text.size(), std::max<off_t>(0, size - kMost));
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

Finding failure(std::string message, const UniqueFd& output) {
  const std::string said = tail_of(output);
  if (!said.empty()) message += "; the ranks wrote: " + said;
  return problem(kCheck, std::move(message),
                 "mend the problems above, if there are any; LOCKSTEP_LOG=debug lockstep doctor --self-test "
                 "says more");
}

Finding judge_result(const launch::SpawnResult& result, std::chrono::milliseconds timeout,
                     const UniqueFd& output) {
  if (!result.failed.empty()) {
    const int rank = result.failed.front();
    const auto& outcome = result.outcomes[static_cast<size_t>(rank)];
    if (outcome.exception) {
      return failure("rank " + std::to_string(rank) + " of two: " + *outcome.exception, output);
    }
    return failure(launch::describe_failure(rank, outcome), output);
  }
  if (result.deadline_passed) {
    return failure("two ranks did not end within " + std::to_string(timeout.count()) + " ms", output);
  }
  return ok(kCheck,
            "two ranks: all_reduce, broadcast, send and recv of 64 B to 1 MiB, staged and shared, gave the "
            "right values");
}

/// What `lockstep run` writes there, and the flight recorder.
std::optional<Finding> judge_temporary_folder() {
  const std::string folder = environment::text("TMPDIR").value_or("/tmp");
  std::string path = folder + "/lockstep_doctor_XXXXXX";
  if (::mkdtemp(path.data()) != nullptr) {
    ::rmdir(path.c_str());
    return std::nullopt;
  }
  return problem(kCheck, "no folder can be made in " + folder + ": " + std::strerror(errno),
                 "set TMPDIR to a folder that is there and can be written; lockstep run needs it");
}

}  // namespace

Finding run_self_test(const SelfTestOptions& options) {
  if (auto finding = judge_temporary_folder()) return *finding;
  UniqueFd output = output_file();
  launch::SpawnRequest request;
  request.options.argv = options.argv;
  request.options.label = "doctor-self-test";
  request.options.grace_period = std::chrono::seconds(2);
  request.options.environment = {{"OMP_NUM_THREADS", "1"}};
  request.nprocs = kRanks;
  request.deadline = Deadline::after(options.timeout);
  if (output) request.outputs.assign(kRanks, output.get());
  std::optional<launch::SpawnResult> result;
  try {
    result = launch::spawn_processes(request, [&](int rank) { run_rank(rank, options.timeout); });
  } catch (const c10::Error& error) {
    return failure(std::string("two ranks can't be started: ") + error.what_without_backtrace(), output);
  }
  // Only a child on its way to another call gets nothing.
  TORCH_CHECK(result, "lockstep doctor was started by another program's spawn()");
  if (result->interrupted_by) {
    ::raise(*result->interrupted_by);
    return failure("it was interrupted", output);
  }
  return judge_result(*result, options.timeout, output);
}

}  // namespace lockstep::doctor

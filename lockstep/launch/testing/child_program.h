#pragma once

#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::testing {

/// The path of a built program.
inline std::string program_path(const std::string& name) {
  const std::string folder =
      environment::text("LOCKSTEP_BIN_DIR")
          .value_or(std::filesystem::read_symlink("/proc/self/exe").parent_path().string());
  return folder + "/" + name;
}

/// A program as a child of the test, with pipes for its output.
class ChildProgram {
 public:
  explicit ChildProgram(std::vector<std::string> command,
                        const std::map<std::string, std::string>& environment = {}) {
    std::vector<char*> argv;
    for (auto& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    int out_ends[2];
    int err_ends[2];
    if (::pipe2(out_ends, O_CLOEXEC) != 0 || ::pipe2(err_ends, O_CLOEXEC) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(out_ends[1], 1);
      ::dup2(err_ends[1], 2);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      ::execv(argv[0], argv.data());
      ::_exit(126);
    }
    ::close(out_ends[1]);
    ::close(err_ends[1]);
    out_.reset(out_ends[0]);
    err_.reset(err_ends[0]);
  }
  ChildProgram(const ChildProgram&) = delete;
  ChildProgram& operator=(const ChildProgram&) = delete;
  ~ChildProgram() {
    if (pid_ > 0) finish();
  }

  pid_t pid() const { return pid_; }
  /// One line of its standard output, waited for.
  std::string line() {
    std::string text;
    char byte = 0;
    while (::read(out_.get(), &byte, 1) == 1 && byte != '\n') text += byte;
    return text;
  }
  /// Waits for its end; `out` and `err` hold the rest of the output. Exit status, or minus the signal. Its children hold
  /// no end of its pipes, so that reading needs no thread for small outputs.
  int finish() {
    out += read_all(out_.get());
    err += read_all(err_.get());
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::string out;
  std::string err;

 private:
  static std::string read_all(int fd) {
    std::string text;
    char buffer[4096];
    ssize_t got = 0;
    while ((got = ::read(fd, buffer, sizeof(buffer))) > 0) text.append(buffer, static_cast<size_t>(got));
    return text;
  }

  pid_t pid_ = -1;
  UniqueFd out_;
  UniqueFd err_;
};

}  // namespace lockstep::testing

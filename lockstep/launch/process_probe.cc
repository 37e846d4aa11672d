// Says in lines what a process finds that a launcher has started; fork_server_test.cc compares those that were forked with those
// that were executed. It has no arguments of its own. With "stay" it says its pid, and stays.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <signal.h>
#include <string>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include <lockstep/base/process/cpu.h>
#include <lockstep/base/process/cpu_list.h>
#include <lockstep/launch/fork_server.h>

namespace {

/// As other processes see it.
std::vector<std::string> shown_environment() {
  std::ifstream file("/proc/self/environ");
  std::vector<std::string> variables;
  for (std::string variable; std::getline(file, variable, '\0');)
    if (!variable.empty()) variables.push_back(variable);
  std::sort(variables.begin(), variables.end());
  return variables;
}

std::vector<std::string> environment() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  std::sort(variables.begin(), variables.end());
  return variables;
}

void say_open_files() {
  std::map<int, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    files[std::stoi(entry.path().filename())] = std::filesystem::read_symlink(entry.path());
  for (const auto& [number, file] : files)
    if (!file.ends_with("/fd")) std::cout << "file " << number << ' ' << file << '\n';
}

void say_signals() {
  sigset_t blocked;
  ::sigprocmask(SIG_SETMASK, nullptr, &blocked);
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action = {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_DFL)
      std::cout << "signal " << signal << " is not as by default\n";
    if (::sigismember(&blocked, signal) == 1) std::cout << "signal " << signal << " is blocked\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto* given = lockstep::launch::forked_arguments();
  const auto words = given != nullptr ? *given : std::vector<std::string>(argv, argv + argc);
  if (words.back() == "stay") {
    std::cout << ::getpid() << (given != nullptr ? " forked" : " executed") << std::endl;
    ::pause();
  }
  std::cout << (given != nullptr ? "forked\n" : "executed\n");
  for (const std::string& word : words) std::cout << "word " << word << '\n';
  for (const std::string& variable : environment()) std::cout << "variable " << variable << '\n';
  for (const std::string& variable : shown_environment()) std::cout << "shown variable " << variable << '\n';
  std::cout << "folder " << std::filesystem::current_path().string() << '\n';
  say_open_files();
  say_signals();
  int at_end = 0;
  ::prctl(PR_GET_PDEATHSIG, &at_end);
  char name[16] = {};
  ::prctl(PR_GET_NAME, name);
  rlimit files = {};
  ::getrlimit(RLIMIT_NOFILE, &files);
  std::cout << "gets signal " << at_end << " when " << ::getppid() << " ends\nleads its group "
            << (::getpgid(0) == ::getpid()) << "\nis called " << name << "\nmay open " << files.rlim_cur
            << "\nis on cores " << lockstep::format_cpu_list(lockstep::CoreMask::current().cores())
            << std::endl;
  return 0;
}

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <lockstep/launch/agent/orphan_watch.h>

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kBetweenLooks{1};

}  // namespace

size_t reap_orphans(const std::vector<pid_t>& own) {
  size_t reaped = 0;
  // The children of the main thread, which gets the orphans. waitid(P_ALL) would return one ended worker each time,
  // which must stay until all workers have ended, and none of the children after it.
  std::ifstream children("/proc/self/task/" + std::to_string(::getpid()) + "/children");
  for (pid_t pid = 0; children >> pid;) {
    if (std::find(own.begin(), own.end(), pid) == own.end() && ::waitpid(pid, nullptr, WNOHANG) == pid)
      ++reaped;
  }
  return reaped;
}

OrphanWatch::OrphanWatch() : look_at_(::getpid() == 1 ? Deadline::after(kBetweenLooks) : Deadline::never()) {}

void OrphanWatch::look(const std::vector<pid_t>& own) {
  if (!look_at_.expired()) return;
  look_at_ = Deadline::after(kBetweenLooks);
  reap_orphans(own);
}

}  // namespace lockstep::launch

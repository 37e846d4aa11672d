#include <csignal>
#include <unistd.h>

#include <lockstep/base/process/signal_of_child.h>

namespace lockstep {

bool leave_signal_to_child(pid_t owner, int signal) noexcept {
  if (::getpid() == owner) return false;
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
  ::raise(signal);  // it waits until the handler, which blocks it, has returned
  return true;
}

}  // namespace lockstep

#pragma once

#include <csignal>

namespace lockstep::transport {

using FaultHandler = void (*)(int signal, siginfo_t* info, void* context);

/// Handles SIGSEGV by `handler` from now on, unless it does already; `before` becomes what did so until now.
inline void install_fault_handler(FaultHandler handler, struct sigaction& before) {
  struct sigaction current {};
  ::sigaction(SIGSEGV, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == handler) return;
  before = current;
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, nullptr);
}

/// For a handler whose fault it is not: the handler from before it comes next. Async-signal-safe.
inline void pass_fault_on(const struct sigaction& before, int signal, siginfo_t* info, void* context) {
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    ::sigaction(signal, &before, nullptr);  // the instruction faults again, and ends the process
  }
}

}  // namespace lockstep::transport

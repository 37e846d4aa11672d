#include <csignal>
#include <pthread.h>
#include <string>
#include <utility>

#include <lockstep/base/process/background_thread.h>

namespace lockstep {
namespace {

std::thread start_thread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread([name = std::string(name), body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name.c_str());  // before a profiler asks for it
      body();
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

BackgroundThread::~BackgroundThread() {
  // A handle to a thread of the parent can neither be joined nor destroyed; it is left to the process's end.
  if (fork_guard_.in_forked_child() && thread_.joinable()) new std::thread(std::move(thread_));
}

void BackgroundThread::start(const char* name, std::function<void()> body) {
  thread_ = start_thread(name, std::move(body));
}

void BackgroundThread::join() {
  if (thread_.joinable()) thread_.join();
}

void start_detached_thread(const char* name, std::function<void()> body) {
  start_thread(name, std::move(body)).detach();
}

}  // namespace lockstep

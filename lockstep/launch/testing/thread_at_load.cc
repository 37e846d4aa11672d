// A library that starts a thread when it is loaded, as some do.
#include <thread>
#include <unistd.h>

namespace {

[[maybe_unused]] const bool started = [] {
  std::thread([] { ::pause(); }).detach();
  return true;
}();

}  // namespace

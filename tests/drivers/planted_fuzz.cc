// A fuzz target with mistakes, for fuzz_test.py: which one PLANTED says.
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::planted_fuzz {
namespace {

std::vector<std::string> seeds() {
  return {"count=7 name=x", "list=[1,2]"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(planted, seeds) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const char* variable = std::getenv("PLANTED");
  const std::string mistake = variable == nullptr ? "" : variable;
  if (text.find("count=18446744073709551615") == std::string::npos) return 0;
  if (mistake == "abort") std::abort();
  if (mistake == "throw") throw std::runtime_error("planted");
  if (mistake == "exit") ::_exit(0);
  if (mistake == "kill") ::raise(SIGKILL);
  if (mistake == "hang") {
    while (true) ::pause();
  }
  if (mistake == "memory") {
    std::vector<char*> blocks;
    while (true) {
      blocks.push_back(new char[size_t{64} << 20]);
      std::memset(blocks.back(), 1, size_t{1} << 20);
    }
  }
  return 0;
}

}  // namespace lockstep::planted_fuzz

// The main() of programs that hold drivers.
#include <exception>
#include <iostream>
#include <map>
#include <string_view>

#include <lockstep/testing/driver.h>

namespace lockstep::testing {
namespace {

std::map<std::string_view, DriverMain>& drivers() {
  static std::map<std::string_view, DriverMain> all;
  return all;
}

/// What is to run for a program that was started as `path`; null if that is no driver's name. A program with
/// one driver may be called as it likes.
DriverMain find_driver(std::string_view path) {
  const auto found = drivers().find(path.substr(path.rfind('/') + 1));
  if (found != drivers().end()) return found->second;
  return drivers().size() == 1 ? drivers().begin()->second : nullptr;
}

}  // namespace

bool add_driver(const char* name, DriverMain run) {
  return drivers().emplace(name, run).second;
}

}  // namespace lockstep::testing

int main(int argc, char** argv) {
  using namespace lockstep::testing;
  if (const DriverMain run = find_driver(argv[0])) {
    try {
      return run(argc, argv);
    } catch (const std::exception& error) {
      std::cerr << argv[0] << ": " << error.what() << std::endl;
      return 1;
    }
  }
  std::cerr << argv[0] << ": start it by a link that has the name of one of its drivers:\n";
  for (const auto& [name, run] : drivers()) std::cerr << "  " << name << '\n';
  return 2;
}

#pragma once

/// A driver is a program that tests in Python start. Most of what such a program costs to build is LibTorch's
/// headers and the linker, so several drivers are compiled together into one program (the rooms' DRIVERS into
/// `test_drivers`), and bin/NAME_driver is a link to it: it runs the driver by whose name it is started. The
/// file NAME_driver.cc defines its driver as it would define main():
///
///     LOCKSTEP_DRIVER(name_driver) {
///       if (argc != 2) return 2;
///       …
///       return 0;
///     }
///
/// A std::exception that leaves it is printed, and is exit status 1.
#define LOCKSTEP_DRIVER(name)                                                                         \
  static int run_##name(int argc, char** argv);                                                       \
  [[maybe_unused]] static const bool has_##name = ::lockstep::testing::add_driver(#name, run_##name); \
  static int run_##name([[maybe_unused]] int argc, [[maybe_unused]] char** argv)

namespace lockstep::testing {

using DriverMain = int (*)(int argc, char** argv);

/// Lets main(), in driver.cc, run the driver. Called before main(); returns true.
bool add_driver(const char* name, DriverMain run);

}  // namespace lockstep::testing

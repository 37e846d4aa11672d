#pragma once

#include <string>

#include <lockstep/rendezvous/launch_environment.h>
#include <lockstep/rendezvous/rendezvous.h>

namespace lockstep::rendezvous_internal {

/// An init_method taken apart.
struct InitMethod {
  enum class Scheme { kEnvironment, kTcp, kFile };
  Scheme scheme = Scheme::kEnvironment;
  std::string host = {};
  uint16_t port = 0;
  std::string path = {};
  int rank = -1;        ///< from ?rank=; -1 without
  int world_size = -1;  ///< from ?world_size=; -1 without
};

/// Parses "", env://, tcp://HOST:PORT, file:///PATH, each with ?rank=R&world_size=N. IPv6 addresses stand in
/// brackets. Throws c10::ValueError that shows the method.
InitMethod parse_init_method(const std::string& text);

/// What rendezvous() is going to do: options and environment reconciled. With a store given, `meeting` means
/// nothing.
struct RendezvousPlan {
  int rank = -1;
  int world_size = -1;
  Meeting meeting = {};
};

/// A pure function; `program` is for the line to type in the error. Throws c10::ValueError when something is
/// missing or options contradict the environment; a NoMeeting is thrown as its reason, never returned.
RendezvousPlan make_plan(const RendezvousOptions& options, const LaunchEnvironment& environment,
                         const std::string& program);

}  // namespace lockstep::rendezvous_internal

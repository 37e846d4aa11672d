#pragma once

#include <string>

namespace lockstep::flight::internal {

/// Where this process's flight records go; see flight_directory() in rendezvous/.
std::string record_directory();

/// Writes the file `name` of record_directory(), which is made when it is not there, as a whole or not at
/// all; returns its path. The default directory must be one that only this user can enter, and no symbolic
/// link on the way to it below TMPDIR is followed, so that no other user can redirect the write. Throws
/// c10::Error that names the path and the cause.
std::string write_record(const std::string& name, const std::string& text);

}  // namespace lockstep::flight::internal

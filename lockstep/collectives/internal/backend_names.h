#pragma once

#include <string>

/// Names of backends as torch.distributed writes them: "NAME", or "DEVICE:NAME,DEVICE:NAME". Thread-safe.
namespace lockstep::backend_names {

constexpr const char* kLockstep = "lockstep";

/// The name in lower case, if groups can be made with it; "lockstep" for an empty one. Throws c10::ValueError
/// with the remedy otherwise.
std::string check(const std::string& backend);

/// torch.distributed.is_backend_available. Throws c10::ValueError for a malformed list of pairs.
bool is_available(const std::string& backend);

/// "cpu:lockstep": which backend serves which device. `backend` comes from check().
std::string config(const std::string& backend);

}  // namespace lockstep::backend_names

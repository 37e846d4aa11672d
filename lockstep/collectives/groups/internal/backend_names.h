#pragma once

#include <string>
#include <utility>
#include <vector>

#include <c10/core/DeviceType.h>

/// Names of backends as torch.distributed writes them: "NAME", or "DEVICE:NAME,DEVICE:NAME". Thread-safe.
namespace lockstep::collectives::internal::backend_names {

constexpr const char* kLockstep = "lockstep";
constexpr const char* kNccl = "nccl";
constexpr const char* kGloo = "gloo";  // another name for kLockstep
/// What an empty name becomes where each rank has a card of its own.
constexpr const char* kBoth = "cpu:lockstep,cuda:nccl";

/// The name in lower case, if groups can be made with it; an empty one, which leaves the choice to us, stays
/// empty. "gloo", which PyTorch's programs name for the CPU, becomes "lockstep", and the log says so. Whether
/// NCCL works here is another question. Throws c10::ValueError with the remedy otherwise.
std::string check(const std::string& backend);

/// torch.distributed.is_backend_available: NCCL is where this build has it, with or without a card. Throws
/// c10::ValueError for a malformed list of pairs.
bool is_available(const std::string& backend);

/// Which backend serves which device's tensors, in the order given; "lockstep" alone serves all, "nccl" alone
/// CUDA's. CPU tensors go over "lockstep" in any case. `backend` comes from check() and is not empty.
std::vector<std::pair<c10::DeviceType, std::string>> by_device(const std::string& backend);
bool uses_nccl(const std::string& backend);

/// "cpu:lockstep,cuda:nccl", as torch.distributed.get_backend_config writes it.
std::string config(const std::string& backend);

}  // namespace lockstep::collectives::internal::backend_names

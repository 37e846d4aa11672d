#pragma once

#include <string>

#include <lockstep/doctor/facts.h>

/// Fills in Facts. Nothing here judges, and nothing throws because a file is missing or odd: what is not
/// known stays empty.
namespace lockstep::doctor {

/// What files below `root` tell: kernel, cores, memory, limits, /dev/shm, RDMA and GPU devices. `root` is ""
/// for this machine, or a folder that has proc/, sys/ and dev/ (a test's).
Facts gather_machine(const std::string& root = "");

/// Tries things out: memory files, descriptor passing, pidfds, loopback, the resolution of the host's name,
/// UCX, CUDA. Takes up to some seconds where a name server or a GPU driver does not answer. `root` as above,
/// for what /sys tells about network interfaces.
void gather_probes(Facts& facts, const std::string& root = "");

/// Versions and paths of Lockstep and torch.
Software gather_software();

/// The compilers with which a user would build: CXX or else c++, and g++. Runs each.
std::vector<Compiler> gather_compilers();

/// This process's environment as far as is_relevant_variable().
std::map<std::string, std::string> gather_environment();

/// Whether training looks at this environment variable: those of Lockstep, torch, launchers, OpenMP, MKL,
/// NCCL, Gloo, UCX and CUDA.
bool is_relevant_variable(const std::string& name);

/// All of the above, for this machine.
Facts gather_facts();

}  // namespace lockstep::doctor

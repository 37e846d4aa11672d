#pragma once

#include <cstdint>

#include <lockstep/doctor/facts.h>
#include <lockstep/doctor/finding.h>

/// What Facts mean. Pure functions: the same facts, the same findings.
namespace lockstep::doctor {

/// Where findings begin. docs/doctor.md lists them.
namespace thresholds {
constexpr int kTorchMajor = 2;  // the oldest torch that Lockstep takes: 2.11
constexpr int kTorchMinor = 11;
constexpr int kGcc = 11;         // the oldest g++
constexpr int kKernelMajor = 5;  // the oldest kernel: 5.4, for waiting on pidfds
constexpr int kKernelMinor = 4;
constexpr int64_t kMemoryProblem = int64_t{256} << 20;  // bytes left: two ranks' segments, and the reserve
constexpr int64_t kMemoryWarning = int64_t{2} << 30;
constexpr int64_t kOpenFilesProblem = 64;  // a rank needs some 3 per peer, and libraries theirs
constexpr int64_t kOpenFilesWarning = 1024;
constexpr int64_t kProcessesWarning = 1024;                    // threads count: each rank has some per core
constexpr int64_t kPidsWarning = 512;                          // of the control group
constexpr int64_t kAddressSpaceWarning = int64_t{64} << 30;    // bytes; every rank maps every peer's memory
constexpr int64_t kLockedMemoryWarning = int64_t{1} << 30;     // bytes, where there is RDMA hardware
constexpr int64_t kDevShmNote = int64_t{1} << 30;              // bytes; Docker's default is 64 MiB
constexpr std::chrono::milliseconds kResolutionWarning{1000};  // of the own host name
}  // namespace thresholds

/// Everything. The order is that of the report.
Findings judge(const Facts& facts);

// Its parts, by file.
Findings judge_software(const Facts& facts);     // Lockstep, torch, compiler, UCX, GPU
Findings judge_cuda(const Facts& facts);         // Lockstep's part for CUDA, NCCL and its variables
Findings judge_machine(const Facts& facts);      // kernel, cores, memory, limits, network
Findings judge_environment(const Facts& facts);  // variables

}  // namespace lockstep::doctor

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// What `lockstep doctor` knows about a machine. Plain values: gather.h fills them in, judge.h reads them,
/// and a test writes them by hand. An optional is empty where the system does not tell.
namespace lockstep::doctor {

struct Compiler {
  std::string path;
  std::string version;  ///< "12.2.0"; empty if it did not say
  bool is_gcc = false;
};

struct Software {
  std::string lockstep_version;
  std::string lockstep_path;   ///< of the library that runs
  std::string torch_compiled;  ///< "2.13.0": the headers that Lockstep was compiled with
  std::string torch_loaded;    ///< "2.13.0": what the loaded library says of itself
  std::string torch_path;      ///< of the loaded libtorch_cpu.so
  std::string torch_cuda;      ///< "13.0"; empty for a CPU build
  std::string torch_commit;
  std::string built_with;           ///< the compiler that compiled Lockstep
  std::vector<Compiler> compilers;  ///< those a user would build with: CXX, or what PATH has
};

struct Kernel {
  std::string release;  ///< "6.1.0-13-amd64"
  int major = 0;
  int minor = 0;
  std::string clock_source;         ///< "tsc"; empty if unknown
  std::optional<int> ptrace_scope;  ///< of Yama; empty where there is no Yama
};

struct Cores {
  std::vector<int> online;
  std::vector<int> allowed;                  ///< by the affinity mask
  std::optional<double> quota;               ///< cores, by the tightest control group
  std::vector<std::vector<int>> numa_nodes;  ///< cores of each node that has any
  std::optional<bool> smt_active;
  int physical = 0;  ///< cores without their hyperthreads, of those online; 0 if unknown
};

struct Memory {
  int64_t total = 0;
  int64_t available = 0;
  std::optional<int64_t> cgroup_limit;  ///< the tightest
  std::optional<int64_t> cgroup_left;   ///< below the limit that leaves least
};

/// A limit of setrlimit(2): the soft value, and the hard one up to which any process may raise it.
struct Limit {
  std::optional<int64_t> soft;  ///< empty: unlimited
  std::optional<int64_t> hard;
};
struct Limits {
  bool known = false;
  Limit open_files;
  Limit locked_memory;  ///< bytes
  Limit processes;
  Limit address_space;              ///< bytes
  std::optional<int64_t> pids_max;  ///< of the control group
};

struct DevShm {
  bool mounted = false;
  int64_t size = 0;
  int64_t free = 0;
};

/// A thing that was tried out.
struct Probe {
  bool works = false;
  std::string error;  ///< why not
};

struct Interface {
  std::string name;
  bool up = false;
  bool loopback = false;
  std::optional<int> speed_mbit;
  std::vector<std::string> addresses;
};
struct Network {
  std::vector<Interface> interfaces;
  std::string between_hosts;  ///< the interface that a job over several hosts would use; empty: none
  Probe loopback_tcp;         ///< a connection from 127.0.0.1 to itself
  std::string hostname;
  Probe resolution;                             ///< of the host's own name
  std::vector<std::string> resolved;            ///< to these addresses
  std::chrono::milliseconds resolution_time{};  ///< as long as it took, or was waited for
};

struct Ucx {
  std::string missing = {};                     ///< why there is none: not installed, or not in this build
  std::string engine = {};                      ///< with what it would use: "UCX 1.13.1 (tcp/eth0)"
  std::string error = {};                       ///< why it can't be used
  std::vector<std::string> rdma_hardware = {};  ///< in /sys/class/infiniband: "mlx5_0"
};

struct Gpu {
  int device_files = 0;                     ///< /dev/nvidia0, 1, …
  bool wsl_device = false;                  ///< /dev/dxg
  std::string driver = {};                  ///< version of the kernel module
  bool cuda_library = false;                ///< libcuda.so.1 can be loaded
  std::string cuda_error = {};              ///< of cuInit, or why the library could not be loaded
  std::optional<int> cuda_devices = {};     ///< what the driver offers this process
  std::string smi_error = {};               ///< why nvidia-smi failed
  std::vector<std::string> smi_names = {};  ///< "NVIDIA H200, 143771 MiB"
};

/// Lockstep's part for CUDA, as a child process found it: loading it takes 270 MB, and may end a process.
struct CudaPart {
  bool asked = false;                     ///< torch is a CUDA build
  bool loads = false;                     ///< liblockstep_cuda, and torch's CUDA library with it
  std::string error = {};                 ///< why not
  std::string nccl = {};                  ///< version of the NCCL library: "2.29.7"
  std::string problem = {};               ///< why no card can be used; empty: one can
  std::vector<std::string> devices = {};  ///< "NVIDIA H100 80GB HBM3 (GPU-8a5c…)"
  /// Variables that are set and are called NCCL_…, whose names the NCCL library does not have.
  std::vector<std::string> unknown_variables = {};
};

struct Facts {
  Software software;
  Kernel kernel;
  Cores cores;
  Memory memory;
  Limits limits;
  DevShm dev_shm;
  Probe memfd;
  Probe fd_passing;
  Probe pidfd;
  Network network;
  Ucx ucx;
  Gpu gpu;
  CudaPart cuda;
  std::map<std::string, std::string> environment;  ///< the variables of is_relevant_variable()
};

/// The value of a variable; null when it is unset or empty, which counts as unset.
inline const std::string* value_of(const std::map<std::string, std::string>& environment,
                                   const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() || found->second.empty() ? nullptr : &found->second;
}

}  // namespace lockstep::doctor

#include <cstdio>

#include <lockstep/doctor/judge.h>

namespace lockstep::doctor {
namespace {

struct Version {
  int major = 0;
  int minor = 0;
  int patch = 0;
};

/// Missing parts are 0.
Version parse_version(const std::string& text) {
  Version version;
  std::sscanf(text.c_str(), "%d.%d.%d", &version.major, &version.minor, &version.patch);
  return version;
}

Finding judge_lockstep(const Software& software) {
  return ok("lockstep", software.lockstep_version + ", " + software.lockstep_path + ", compiled by " +
                            software.built_with);
}

Finding judge_torch(const Software& software) {
  const Version compiled = parse_version(software.torch_compiled);
  const Version loaded = parse_version(software.torch_loaded);
  const std::string where = " from " + software.torch_path;
  if (software.torch_loaded.empty()) {
    return problem("torch", "the loaded library" + where + " does not say its version",
                   "see which libtorch_cpu.so LD_LIBRARY_PATH or LD_PRELOAD brings in");
  }
  if (loaded.major != compiled.major || loaded.minor != compiled.minor) {
    return problem("torch",
                   "Lockstep was compiled for " + software.torch_compiled + " but runs with " +
                       software.torch_loaded + where + "; torch's C++ interface changes with each release",
                   "build Lockstep anew for this torch, or mend LD_LIBRARY_PATH");
  }
  using thresholds::kTorchMajor;
  using thresholds::kTorchMinor;
  if (loaded.major < kTorchMajor || (loaded.major == kTorchMajor && loaded.minor < kTorchMinor)) {
    return problem("torch", software.torch_loaded + where + " is too old",
                   "use torch 2.11 or newer and build Lockstep anew");
  }
  if (loaded.patch != compiled.patch) {
    return warning("torch",
                   "Lockstep was compiled for " + software.torch_compiled + " but runs with " +
                       software.torch_loaded + where,
                   "build Lockstep anew for this torch");
  }
  const std::string kind =
      software.torch_cuda.empty() ? "CPU build" : "CUDA " + software.torch_cuda + " build";
  return ok("torch", software.torch_loaded + ", " + kind + where);
}

Finding judge_compiler(const Software& software) {
  constexpr const char* kRemedy =
      "install g++ 11 or newer (Debian, Ubuntu: apt-get install g++) and name it in CXX";
  if (software.compilers.empty()) {
    return note("compiler", "no C++ compiler in PATH; one is needed only to build programs", kRemedy);
  }
  std::string good;
  std::string old;
  for (const Compiler& compiler : software.compilers) {
    const bool too_old = compiler.is_gcc && !compiler.version.empty() &&
                         parse_version(compiler.version).major < thresholds::kGcc;
    std::string& list = too_old ? old : good;
    list += (list.empty() ? "" : ", ") + compiler.path + " " +
            (compiler.version.empty() ? "(version unknown)" : compiler.version);
  }
  if (good.empty()) return warning("compiler", old + " is too old for C++20", kRemedy);
  return ok("compiler", good);
}

Finding judge_ucx(const Ucx& ucx) {
  if (!ucx.missing.empty()) {
    return note("ucx", ucx.missing, "nothing on one machine: only jobs over several hosts need it");
  }
  if (!ucx.error.empty()) {
    return warning(
        "ucx", ucx.error,
        "name another interface in LOCKSTEP_SOCKET_IFNAME; unset variables UCX_…; jobs over several "
        "hosts do not start here");
  }
  std::string unused;
  for (const std::string& device : ucx.rdma_hardware) {
    if (ucx.engine.find("/" + device + ":") == std::string::npos)
      unused += (unused.empty() ? "" : ", ") + device;
  }
  if (!unused.empty()) {
    return note(
        "ucx", ucx.engine + ", without the RDMA devices that are here: " + unused,
        "see that their ports are active (ibv_devinfo), that UCX_TLS and UCX_NET_DEVICES leave them in, and "
        "that this UCX was built for RDMA (PyPI's is not)");
  }
  return ok("ucx", ucx.engine);
}

std::string smi_list(const Gpu& gpu) {
  std::string list;
  for (const std::string& name : gpu.smi_names) list += (list.empty() ? ": " : "; ") + name;
  return list;
}

Finding judge_gpu(const Gpu& gpu, const Software& software, const std::string* visible) {
  const int files = gpu.wsl_device && gpu.device_files == 0 ? 1 : gpu.device_files;
  const std::string driver = gpu.driver.empty() ? "" : ", driver " + gpu.driver;
  if (files == 0 && gpu.cuda_devices.value_or(0) == 0) {
    if (!gpu.driver.empty()) {
      return warning("gpu", "the NVIDIA driver " + gpu.driver + " is loaded, but there is no /dev/nvidia0",
                     "in a container: start it with --gpus all; else run nvidia-smi as root once");
    }
    return ok("gpu", "no NVIDIA GPU: training runs on the CPU");
  }
  if (!gpu.smi_error.empty()) {
    return warning("gpu", "nvidia-smi fails: " + gpu.smi_error,
                   "see dmesg for NVRM or Xid lines; a driver that was updated wants a reboot");
  }
  if (!gpu.cuda_library) {
    return warning("gpu", std::to_string(files) + " NVIDIA device(s)" + driver + ", but " + gpu.cuda_error,
                   "install the driver's libraries; in a container: start it with --gpus all and "
                   "NVIDIA_DRIVER_CAPABILITIES=compute,utility");
  }
  if (!gpu.cuda_error.empty()) {
    return warning("gpu", std::to_string(files) + " NVIDIA device(s)" + driver + ", but " + gpu.cuda_error,
                   "see dmesg, and whether the driver's module and its libraries have one version");
  }
  if (gpu.cuda_devices.value_or(0) == 0) {
    const bool hidden = visible != nullptr;
    return note("gpu",
                std::to_string(files) + " NVIDIA device(s)" + driver + ", none of which CUDA offers" +
                    (hidden ? " (CUDA_VISIBLE_DEVICES is '" + *visible + "')" : ""),
                hidden ? "unset CUDA_VISIBLE_DEVICES if GPUs are wanted"
                       : "run nvidia-smi; the user needs access to /dev/nvidia*");
  }
  const std::string found = std::to_string(*gpu.cuda_devices) + " CUDA device(s)" + driver + smi_list(gpu);
  if (software.torch_cuda.empty()) {
    return note("gpu", found + "; torch is a CPU build and does not use them",
                "install torch's CUDA build if GPUs are wanted");
  }
  return ok("gpu", found);
}

}  // namespace

Findings judge_software(const Facts& facts) {
  const auto visible = facts.environment.find("CUDA_VISIBLE_DEVICES");
  return {
      judge_lockstep(facts.software), judge_torch(facts.software), judge_compiler(facts.software),
      judge_ucx(facts.ucx),
      judge_gpu(facts.gpu, facts.software, visible == facts.environment.end() ? nullptr : &visible->second)};
}

Findings judge(const Facts& facts) {
  Findings all;
  for (auto part : {judge_software, judge_cuda, judge_machine, judge_environment}) {
    for (Finding& finding : part(facts)) all.push_back(std::move(finding));
  }
  return all;
}

}  // namespace lockstep::doctor

#pragma once

#include <c10/core/Device.h>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep {

/// The device of this process: CUDA device number LOCAL_RANK where torch can use CUDA devices, else the CPU.
/// The number is the rank on this host, never the rank in the job, which is wrong from the second host on. It
/// is read as rendezvous() reads it (torchrun's, Open MPI's, MPICH's or Slurm's variable); alone it is 0.
/// Throws c10::ValueError when there are CUDA devices but LOCAL_RANK is unknown, or not below their number.
c10::Device local_device();

/// The decision of local_device(), a pure function of the environment and the number of usable CUDA devices.
c10::Device choose_device(const LaunchEnvironment& environment, int cuda_devices);

/// Makes `device` the calling thread's current one, as torch.cuda.set_device does; the CPU needs nothing.
/// Throws c10::ValueError for a CUDA device that does not exist, or where torch has no CUDA, and for other
/// kinds.
void set_device(c10::Device device);

/// set_device(local_device()); returns the device.
c10::Device set_device();

}  // namespace lockstep

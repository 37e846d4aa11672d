#pragma once

#include <functional>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep {

/// The device of this process: CUDA device number LOCAL_RANK where torch can use CUDA devices, else the CPU.
/// The number is the rank on this host, never the rank in the job, which is wrong from the second host on. It
/// is read as rendezvous() reads it (torchrun's, Open MPI's, MPICH's or Slurm's variable); alone it is 0.
/// Loads torch's CUDA library where there may be a card. Throws c10::ValueError when there are CUDA devices
/// but LOCAL_RANK is unknown, or not below their number, and what cuda_device_count() throws.
c10::Device local_device();

/// The decision of local_device(), a pure function of the environment and the number of usable CUDA devices.
c10::Device choose_device(const LaunchEnvironment& environment, int cuda_devices);

/// Makes `device` the calling thread's current one, as torch.cuda.set_device does, and the one that this
/// process has chosen; the CPU needs nothing. Every rank calls it first of all, before anything allocates on
/// a device or asks torch about CUDA (cuda_library.h says why). Throws c10::ValueError for a device that does
/// not exist, where CUDA can't be used (with the reason), and for kinds of device that torch does not know.
void set_device(c10::Device device);

/// set_device(local_device()); returns the device.
c10::Device set_device();

/// The device that this process has chosen by set_device(), or by torch's own means: another CUDA device than
/// the first is current, or it has a CUDA context. Nothing on the CPU. Never loads CUDA. Thread-safe.
std::optional<c10::Device> chosen_device();

/// Says which card a device of one kind is: a text that is the same in all processes that see the card.
using CardIdentity = std::function<std::string(c10::DeviceIndex)>;
/// Installs it for a kind of device, for the life of the process; null takes it away. liblockstep_cuda does.
void set_card_identity(c10::DeviceType type, CardIdentity identity);
/// The card of a device; empty where it is not known.
std::string card_identity(c10::Device device);

}  // namespace lockstep

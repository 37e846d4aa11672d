#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace lockstep::testing::simulated {

/// A generator of random numbers of a simulated device. It draws what a CPU generator with the same seed
/// draws.
at::Generator make_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);
/// The CPU generator behind a device's, for CPU kernels.
at::Generator host_generator(const at::Generator& generator);

}  // namespace lockstep::testing::simulated

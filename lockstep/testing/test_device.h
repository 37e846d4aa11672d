#pragma once

#include <functional>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <gtest/gtest.h>

#include <lockstep/testing/gate.h>

/// The device that tests of device code run on. Tests are written once, against this header:
///
///     TEST(ThingOnDevice, Does) {
///       auto x = torch::ones({4}, test_device());
///       …
///     }
///
/// They run on a simulated device (simulated_device/), which needs no hardware, or on CUDA where
/// LOCKSTEP_TEST_DEVICE=cuda. A program that includes this has the device from its start on, before autograd
/// makes its threads (one for each device there is then).
namespace lockstep::testing {

/// Device number `index`. Makes the simulation torch's accelerator at the first call.
c10::Device test_device(int index = 0);
/// How many there are; the simulation has 2.
int test_device_count();
/// A device for each rank, as far as there are devices.
c10::Device device_of_rank(int rank);
bool test_device_is_simulated();

/// Runs `host_function` in the stream's order, in another thread, as cudaLaunchHostFunc does: a "kernel" that
/// a test can hold back with a Gate. It must not use the device.
void enqueue(const c10::Stream& stream, std::function<void()> host_function);

/// The calling thread's current stream of `device`, and one that nothing else uses just now.
c10::Stream current_stream(c10::Device device);
c10::Stream other_stream(c10::Device device);
/// Returns when everything that was enqueued on any stream of `device` is done.
void synchronize(c10::Device device);

}  // namespace lockstep::testing

/// Ends the test as skipped where there are fewer than `n` devices.
#define LOCKSTEP_NEEDS_DEVICES(n)                       \
  if (::lockstep::testing::test_device_count() < (n)) { \
    GTEST_SKIP() << "needs " << (n) << " GPUs";         \
  }

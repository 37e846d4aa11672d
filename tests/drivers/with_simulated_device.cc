// Linked into a program that knows nothing of tests: makes the simulated device torch's accelerator before main().
#include <lockstep/testing/test_device.h>

namespace {

[[maybe_unused]] const c10::Device device = lockstep::testing::test_device();

}  // namespace

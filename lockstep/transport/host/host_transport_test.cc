#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/transport/host/host_transport.h>

namespace lockstep::transport::host_transport_test {
namespace {

using ::testing::HasSubstr;

/// Where rank 0 finds so many bytes of rank 1, or the error.
std::string find(HostTransport& transport, const MemoryReference& reference, size_t bytes) {
  try {
    transport.address(1, reference, Deadline::after(std::chrono::seconds(60)), bytes);
    return "found";
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
}

TEST(HostTransport, RefusesReferencesOutsideOfASegment) {
  constexpr size_t kBytes = size_t{1} << 20;
  const auto transports = HostTransport::connect_threads(2, {.segment_bytes = kBytes});
  HostTransport& transport = *transports[0];
  EXPECT_EQ(find(transport, {0, 0}, kBytes), "found");
  EXPECT_EQ(find(transport, {0, kBytes - 64}, 64), "found");
  const std::string error = " gave a reference to byte 1048512 of segment 0, which has 1048576 bytes";
  EXPECT_EQ(find(transport, {0, kBytes - 64}, 65), "rank 1" + error);
  EXPECT_THAT(find(transport, {0, kBytes}, 1), HasSubstr("byte 1048576 of segment 0"));
  EXPECT_THAT(find(transport, {0, size_t{1} << 49}, 1), HasSubstr("of segment 0"));
  EXPECT_THAT(find(transport, {1024, 0}, 1), HasSubstr("segment 1024, which no arena has"));
}

}  // namespace
}  // namespace lockstep::transport::host_transport_test

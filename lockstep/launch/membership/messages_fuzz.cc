// What comes from another host, after its TLS connection has shown that it knows the secret: any bytes are a
// message, and then encode() makes the same bytes again, or none.
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/launch/membership/messages.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::messages_fuzz {
namespace {

std::vector<std::string> seeds() {
  const launch::Status status = {.id = {1, 2, 3},
                                 .sent_at = 17,
                                 .host = "node-a",
                                 .node_rank = 1,
                                 .nproc = 8,
                                 .role = "trainer",
                                 .options = "--nnodes=2",
                                 .phase = launch::HostPhase::kFailed,
                                 .generation = 3,
                                 .order = 9,
                                 .exit_status = 1,
                                 .leaving = 15,
                                 .culprit = 7,
                                 .failure = "rank 1 failed first"};
  const launch::Order order = {.job = {9, 8},
                               .number = 10,
                               .status_sent_at = 17,
                               .command = launch::Command::kRun,
                               .place = {4, 1, 2, 8, 16, 29501, 2, 4},
                               .generation = 4,
                               .exit_status = 1,
                               .reason = "host node-c was lost"};
  return {launch::encode(status), launch::encode(order), launch::encode(launch::Status{}),
          launch::encode(launch::Order{}), launch::encode(launch::Report{.agent = {4}, .text = "{}"})};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(messages, seeds) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto status = lockstep::launch::decode_status(bytes);
  if (status && lockstep::launch::encode(*status) != bytes) std::abort();
  const auto order = lockstep::launch::decode_order(bytes);
  if (order && lockstep::launch::encode(*order) != bytes) std::abort();
  const auto report = lockstep::launch::decode_report(bytes);
  if (report && lockstep::launch::encode(*report) != bytes) std::abort();
  return 0;
}

}  // namespace lockstep::messages_fuzz

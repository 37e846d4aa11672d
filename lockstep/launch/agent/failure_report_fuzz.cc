// The error file that a worker leaves behind: any bytes hold a message or none.
#include <cstdlib>
#include <string_view>

#include <lockstep/launch/agent/failure_report.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::failure_report_fuzz {
namespace {

std::vector<std::string> seeds() {
  // torch.distributed.elastic's form, and the short one.
  return {
      R"({"message": {"message": "RuntimeError: no", "extraInfo": {"py_callstack": "a\nb", "timestamp": "17"}}})",
      R"({"message": "\u00e9 \ud83d\ude00 text", "errorCode": 1e3})", "[[[[{}]]]]"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(failure_report, seeds) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto message = lockstep::launch::error_file_message(text);
  if (message && message->size() > size) std::abort();
  return 0;
}

}  // namespace lockstep::failure_report_fuzz

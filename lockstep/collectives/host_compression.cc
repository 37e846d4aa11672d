#include <array>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/collectives/host_compression.h>

namespace lockstep {
namespace {

constexpr std::array<const char*, 3> kCompressionNames = {"none", "bf16", "int8"};

thread_local const BetweenHosts* between_hosts_here = nullptr;

}  // namespace

HostCompression checked_compression(HostCompression compression, const char* option) {
  TORCH_CHECK_VALUE(static_cast<size_t>(compression) < kCompressionNames.size(), option, " is ",
                    static_cast<int>(compression), ", which is no HostCompression: kNone, kBf16 or kInt8");
  return compression;
}

const char* to_string(HostCompression compression) {
  return kCompressionNames.at(static_cast<size_t>(compression));
}

BetweenHosts::BetweenHosts(std::optional<HostCompression> compression,
                           std::shared_ptr<ErrorFeedback> feedback)
    : feedback_(std::move(feedback)), before_(between_hosts_here) {
  if (compression) compression_ = checked_compression(*compression, "between_hosts");
  between_hosts_here = this;
}

BetweenHosts::~BetweenHosts() {
  between_hosts_here = before_;
}

std::optional<HostCompression> BetweenHosts::compression() {
  return between_hosts_here != nullptr ? between_hosts_here->compression_ : std::nullopt;
}

std::shared_ptr<ErrorFeedback> BetweenHosts::feedback() {
  return between_hosts_here != nullptr ? between_hosts_here->feedback_ : nullptr;
}

}  // namespace lockstep

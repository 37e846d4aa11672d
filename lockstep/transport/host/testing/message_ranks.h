#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/group_channel.h>

// Messages with ranks as threads of one process, where ThreadSanitizer sees both sides.
namespace lockstep::transport::message_testing {

using Channel = std::shared_ptr<GroupChannel>;
using Bytes = std::vector<std::byte>;

constexpr int kAny = MessageChannel::kAnySource;

inline Deadline soon() {
  return Deadline::after(std::chrono::seconds(60));
}

inline Bytes pattern(size_t bytes, unsigned seed) {
  Bytes data(bytes);
  std::mt19937 random(seed);
  std::generate(data.begin(), data.end(), [&] { return static_cast<std::byte>(random()); });
  return data;
}

/// Waits, and throws the request's error.
inline void wait(MessageChannel& messages, const MessageChannel::Handle& request) {
  ASSERT_TRUE(messages.wait(request));
  if (messages.error(request)) std::rethrow_exception(messages.error(request));
}

/// On which host each of so many ranks is.
struct Layout {
  const char* name;
  int (*host_of)(int rank);
};
constexpr Layout kLayouts[] = {{"OneHost", [](int) { return 0; }},
                               {"HostsOfOneRank", [](int rank) { return rank; }},
                               {"TwoHosts", [](int rank) { return rank % 2; }}};

inline std::string layout_name(const ::testing::TestParamInfo<Layout>& info) {
  return info.param.name;
}

/// Tests that run in each of the layouts.
class OnLayouts : public ::testing::TestWithParam<Layout> {
 protected:
  static void on_ranks(int ranks, const std::function<void(const Channel& channel)>& body) {
    std::vector<int> host_of;
    for (int rank = 0; rank < ranks; ++rank) host_of.push_back(GetParam().host_of(rank));
    testing::run_rank_threads(host_of, body);
  }
};

}  // namespace lockstep::transport::message_testing

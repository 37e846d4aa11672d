#pragma once

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/transport/host/groups/group_members.h>

namespace lockstep::transport {

/// What the ChannelError says that `action` must throw, of that kind. Fails the test otherwise.
inline std::string failure_of(const std::function<void()>& action, FailureKind kind) {
  try {
    action();
  } catch (const ChannelError& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "should have thrown";
  return "";
}

}  // namespace lockstep::transport

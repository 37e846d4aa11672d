#pragma once

#include <filesystem>

#include <gtest/gtest.h>

#include <lockstep/testing/temporary_folder.h>

namespace lockstep::testing {

/// A test with a new folder of its own.
class FolderTest : public ::testing::Test {
 private:
  const TemporaryFolder temporary_;

 protected:
  const std::filesystem::path& folder_ = temporary_.path();
};

}  // namespace lockstep::testing

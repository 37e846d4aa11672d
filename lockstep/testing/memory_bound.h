#pragma once

#include <cstdio>
#include <optional>
#include <sys/resource.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace lockstep::testing {

/// Address space at most this much more than now, so that unreasonable allocations fail. Sanitizers, which need theirs, have
/// it without a bound.
class MemoryBound {
 public:
  explicit MemoryBound(rlim_t more) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)more;
#else
    rlimit bound{};
    getrlimit(RLIMIT_AS, &bound);
    before_ = bound;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    EXPECT_EQ(std::fscanf(file, "%lu", &pages), 1);
    std::fclose(file);
    bound.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + more;
    EXPECT_EQ(setrlimit(RLIMIT_AS, &bound), 0);
#endif
  }
  MemoryBound(const MemoryBound&) = delete;
  MemoryBound& operator=(const MemoryBound&) = delete;
  ~MemoryBound() {
    if (before_) setrlimit(RLIMIT_AS, &*before_);
  }

 private:
  std::optional<rlimit> before_;
};

}  // namespace lockstep::testing

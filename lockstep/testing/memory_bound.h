#pragma once

#include <cstdio>
#include <sys/resource.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace lockstep::testing {

/// Address space at most this much more than now, so that unreasonable allocations fail. Sanitizers need
/// theirs.
class MemoryBound {
 public:
  explicit MemoryBound(rlim_t more) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    getrlimit(RLIMIT_AS, &before_);
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    EXPECT_EQ(std::fscanf(file, "%lu", &pages), 1);
    std::fclose(file);
    rlimit bound = before_;
    bound.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + more;
    EXPECT_EQ(setrlimit(RLIMIT_AS, &bound), 0);
  }
  ~MemoryBound() {
    setrlimit(RLIMIT_AS, &before_);
  }
#else
    (void)more;
  }
  ~MemoryBound() = default;
#endif
  MemoryBound(const MemoryBound&) = delete;
  MemoryBound& operator=(const MemoryBound&) = delete;

 private:
  rlimit before_{};
};

}  // namespace lockstep::testing

#pragma once

#include <cerrno>
#include <cstddef>
#include <stdexcept>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <utility>
#include <vector>

#include <lockstep/base/unique_fd.h>

namespace lockstep::launch::testing {

/// While it lives this process can open `left` more descriptors.
class FewDescriptors {
 public:
  explicit FewDescriptors(size_t left) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = 512;  // no more have to be used up
    ::setrlimit(RLIMIT_NOFILE, &few);
    while (UniqueFd one = UniqueFd(::eventfd(0, EFD_CLOEXEC))) held_.push_back(std::move(one));
    if (errno != EMFILE || held_.size() < left) throw std::runtime_error("descriptors can't be used up");
    held_.resize(held_.size() - left);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_ = {};
  std::vector<UniqueFd> held_;
};

}  // namespace lockstep::launch::testing

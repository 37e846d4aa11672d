#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/parallel/ddp/options.h>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

/// Some state of a training program that a rank which is behind must get from one that is ahead: as bytes.
class Recoverable {
 public:
  Recoverable(std::function<std::string()> save, std::function<void(const std::string&)> load)
      : save_(std::move(save)), load_(std::move(load)) {}
  /// Any LibTorch optimizer, as torch::save writes it. It must outlive this.
  Recoverable(torch::optim::Optimizer& optimizer);  // NOLINT(google-explicit-constructor)

  std::string save() const { return save_(); }
  void load(const std::string& bytes) const { load_(bytes); }

 private:
  std::function<std::string()> save_;
  std::function<void(const std::string&)> load_;
};

/// Brings the ranks that have done fewer steps than others to the state of the lowest rank of those that have
/// done most: tensors in place, and `states` in order. Returns that number of steps. Collective; costs one
/// small collective when all are equal, as after a failed reduction on one host they are. Over hosts it may
/// have succeeded on one and failed on another. A rank keeps what it has until all has come; `mixed` is true from then until
/// all is in place, and stays so when a state can't be loaded. Where a rank has no memory to keep both, it throws that on
/// this rank, and c10::DistBackendError on the others.
int64_t catch_up(int64_t steps, const std::vector<NamedTensor>& tensors,
                 const std::vector<Recoverable>& states, const ProcessGroup& group, bool& mixed);

}  // namespace lockstep

#pragma once

#include <functional>
#include <string>
#include <utility>

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

}  // namespace lockstep

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

namespace lockstep::monitor {

/// A process on a card, as NVIDIA's driver counts it. In a container `pid` may be the host's number.
struct CardProcess {
  pid_t pid = 0;
  std::optional<int64_t> memory = {};  ///< bytes; nothing where the driver does not tell
};

/// A card at one moment.
struct Card {
  int index = 0;  ///< as NVIDIA's driver numbers them: by PCI address, whatever CUDA_VISIBLE_DEVICES says
  std::string name = {};
  std::optional<int> used_percent = {};     ///< of the time, kernels ran
  std::optional<int64_t> memory_used = {};  ///< bytes; nothing where the driver does not tell, as of cards
                                            ///< that share the host's memory
  std::optional<int64_t> memory_total = {};
  std::vector<CardProcess> processes = {};  ///< that compute
};

/// NVIDIA's management library (libnvidia-ml.so.1), which the driver brings, loaded at run time. Needs neither CUDA nor a
/// context on a card. Used by one thread.
class Nvml {
 public:
  /// Null where there is no driver, or it does not work.
  static std::unique_ptr<Nvml> load();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml();

  /// All cards; those that this user may not see, or that have been lost, are left out.
  std::vector<Card> cards() const;

 private:
  struct Functions;
  explicit Nvml(std::unique_ptr<Functions> functions);

  std::unique_ptr<Functions> functions_;
};

}  // namespace lockstep::monitor

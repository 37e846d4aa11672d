#pragma once

#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// An optimizer whose step() communicates: all ranks of its group make a step, or none does, which GradScaler sees to.
class CollectiveOptimizer {
 public:
  virtual ~CollectiveOptimizer() = default;
  virtual const ProcessGroup& process_group() const = 0;
};

}  // namespace lockstep

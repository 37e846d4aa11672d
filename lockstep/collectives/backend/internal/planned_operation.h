#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/collectives/algorithms/algorithms.h>
#include <lockstep/collectives/backend/internal/operands.h>
#include <lockstep/collectives/backend/internal/operation_queue.h>

namespace lockstep::collectives::internal {

/// A collective that has passed all checks of this rank, ready to stand in the group's queue.
struct PlannedOperation {
  Signature signature;
  c10d::OpType type;
  std::vector<at::Tensor> inputs = {};   // the user's
  std::vector<at::Tensor> outputs = {};  // the user's
  std::shared_ptr<Operands> operands = nullptr;
  std::chrono::milliseconds timeout;  // not positive: the group's
  bool asynchronous;
  std::function<void(const algorithms::Terms&)> body = nullptr;
  FutureForm future_form = {};
};

}  // namespace lockstep::collectives::internal

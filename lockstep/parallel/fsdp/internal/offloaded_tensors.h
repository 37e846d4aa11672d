#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/fsdp/internal/offload_file.h>

namespace torch::optim {
class OptimizerParamState;
}  // namespace torch::optim

namespace lockstep::fsdp::internal {

/// Tensors of one rank whose values lie in files (OffloadFile), such as the state of an optimizer. Used by one thread at a time.
class OffloadedTensors {
 public:
  explicit OffloadedTensors(std::filesystem::path directory) : directory_(std::move(directory)) {}

  /// Moves the values to a file, unless they are in one; the tensor stays what it is. Its place is free when it goes, with all
  /// others of the same file. Throws what OffloadFile::create() throws.
  void take(const at::Tensor& tensor);
  /// Whether they are in a file.
  static bool has(const at::Tensor& tensor);

 private:
  const std::filesystem::path directory_;
  std::shared_ptr<OffloadFile> file_;  // the last one
  size_t file_bytes_ = 0;
  size_t used_ = 0;  // of it
};

/// The tensors in the state of a parameter, of those optimizers that make_optimizer() makes.
std::vector<at::Tensor> tensors_of(torch::optim::OptimizerParamState& state);

}  // namespace lockstep::fsdp::internal

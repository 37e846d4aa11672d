#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/ddp/grad_bucket.h>
#include <lockstep/parallel/ddp/options.h>

namespace lockstep {

/// What a reducer reduces, and how. Its parts read it; the reducer alone changes it, under its mutex.
struct ReducerSettings {
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    bool sparse = false;  // its gradients are
  };

  ReducerSettings(const std::vector<Parameter>& parameters, const DistributedDataParallelOptions& ddp_options)
      : options(ddp_options) {
    for (const Parameter& parameter : parameters) {
      names.push_back(parameter.name);
      tensors.push_back(parameter.tensor);
      sparse.push_back(parameter.sparse);
      dtypes.push_back(parameter.tensor.scalar_type());
      on_cpu = on_cpu && parameter.tensor.is_cpu();
    }
  }

  size_t size() const { return tensors.size(); }
  const ProcessGroup& group() const { return options.process_group; }
  /// Whether each forward's graph tells which parameters are unused.
  bool finds_unused() const { return options.find_unused_parameters && !options.static_graph; }
  /// Whether the built-in reduction adds up, and divides afterwards.
  bool divides_sums() const { return divisor > 0 || reduce_dtype.has_value(); }
  int64_t divides_by() const { return divisor > 0 ? divisor : group()->getSize(); }

  // By parameter:
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  std::vector<at::ScalarType> dtypes;  // their own, whatever mixed precision makes of them for a while

  bool on_cpu = true;                      // all of them
  DistributedDataParallelOptions options;  // with the group
  std::optional<at::ScalarType> reduce_dtype;
  CommunicationHook hook;
  std::string hook_name;
  int64_t divisor = 0;  // 0: the group's size
};

}  // namespace lockstep

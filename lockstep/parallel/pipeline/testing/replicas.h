#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/tensors.h>

// Pipelines that train one model together.
namespace lockstep::pipeline_test {

/// This rank's place in two pipelines of two ranks.
struct Place {
  DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
  int replica = mesh.get_local_rank("dp"), number = mesh.get_local_rank("pp");
  ProcessGroup replicas = mesh.get_group("dp"), pipeline = mesh.get_group("pp");

  /// The replica's half of a batch.
  Batch part_of(const Batch& batch) const {
    const int64_t rows = batch.data.size(0) / 2;
    return {batch.data.narrow(0, replica * rows, rows), batch.target.narrow(0, replica * rows, rows)};
  }
};

/// The parameters of every so manyth stage of a model.
inline Tensors parameters_of(const std::vector<nn::Sequential>& model, size_t first = 0, size_t every = 1) {
  Tensors parameters;
  for (size_t i = first; i < model.size(); i += every) {
    for (const auto& parameter : model[i]->parameters()) parameters.push_back(parameter);
  }
  return parameters;
}

inline Tensors gradients_in(const Tensors& parameters) {
  Tensors gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

inline void expect_close(const Tensors& actual, const Tensors& wanted, double tolerance) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_LT(testing::difference(actual[i], wanted[i]), tolerance) << i;
  }
}

}  // namespace lockstep::pipeline_test

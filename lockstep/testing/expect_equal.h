#pragma once

#include <string>
#include <vector>

#include <ATen/core/Formatting.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <lockstep/serialization/state_dict.h>
#include <lockstep/testing/tensors.h>

// Comparisons of many tensors at once; a failure names the tensor.
namespace lockstep::testing {

/// Fails the test unless the lists hold the same values, undefined tensors included; with a tolerance, unless at::allclose()
/// with it as the relative and as the absolute one holds.
inline void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                         const std::string& what = "", double tolerance = 0) {
  const auto values = [](const at::Tensor& tensor) {
    return tensor.numel() <= 100 ? c10::str(tensor) : c10::str("a tensor of ", tensor.sizes());
  };
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    const at::Tensor &a = actual[i], &b = expected[i];
    ASSERT_EQ(a.defined(), b.defined()) << what << ", tensor " << i;
    if (!a.defined()) continue;
    EXPECT_TRUE(tolerance == 0 ? at::equal(a, b) : at::allclose(a, b, tolerance, tolerance))
        << what << ", tensor " << i << ":\n"
        << values(a) << "\ninstead of\n"
        << values(b);
  }
}

/// Fails the test unless the states have the same names, and tensors that differ by less than the tolerance: by nothing where
/// it is 0.
inline void expect_close(const StateDict& actual, const StateDict& expected, double tolerance = 1e-10) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    const at::Tensor &a = actual.at(name).toTensor(), &b = value.toTensor();
    if (tolerance == 0) {
      EXPECT_TRUE(at::equal(a, b)) << name;
    } else {
      EXPECT_LT(difference(a, b), tolerance) << name;
    }
  }
}
inline void expect_equal(const StateDict& actual, const StateDict& expected) {
  expect_close(actual, expected, 0);
}

}  // namespace lockstep::testing

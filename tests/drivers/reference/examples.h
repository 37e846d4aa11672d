#pragma once

#include <source_location>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/torch.h>

/// The examples of docs/reference, one file for each page; tests/reference_test.py compares the text between
/// `// [NAME]` and `// [end]` with the page, and runs them on four ranks. What follows it checks that
/// the example does what it says.
namespace reference {

/// Each is called by all ranks of a world of four.
void reductions(int rank);
void moving_data(int rank);
void point_to_point(int rank);
void waiting(int rank);
void objects(int rank);
void groups(int rank);
/// Makes and ends the default group itself.
void starting();

inline void expect(bool holds, const std::source_location& where = std::source_location::current()) {
  TORCH_CHECK(holds, where.function_name(), ", line ", where.line(), ": it is not so");
}

/// The tensor's elements, in order, are `values`.
inline void expect_values(const at::Tensor& tensor, const std::vector<double>& values,
                          const std::source_location& where = std::source_location::current()) {
  const auto found = tensor.to(torch::kDouble).flatten();
  TORCH_CHECK(torch::equal(found, torch::tensor(values, torch::kDouble)), where.function_name(), ", line ",
              where.line(), ": found ", found, " instead of ", at::ArrayRef<double>(values));
}

}  // namespace reference

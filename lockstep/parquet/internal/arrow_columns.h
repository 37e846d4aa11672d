#pragma once

#include <arrow/type_fwd.h>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/parquet/column.h>
#include <lockstep/parquet/nulls.h>

/// From Arrow's arrays to columns of tensors.
namespace lockstep::parquet::internal {

using data::Column;
using data::FillValue;
using data::Nulls;

struct NullPolicy {
  Nulls nulls = Nulls::kRefuse;
  std::optional<FillValue> fill;
};

/// Without a copy where Arrow's memory is what the tensors want. Throws c10::Error, beginning with `where`,
/// for nulls that the policy refuses and for values that don't fit.
Column to_column(const arrow::ChunkedArray& array, const NullPolicy& policy, const std::string& where);

}  // namespace lockstep::parquet::internal

#pragma once

#include <cstdint>
#include <string>
#include <variant>

namespace lockstep::data {

/// What a ParquetDataset makes of nulls in a column without a fill value of its own.
enum class Nulls {
  kRefuse,  ///< an error that names the column and how many there are
  kMask,    ///< every column has its masks (Column::valid); where they are false, values are 0, strings and
            ///< lists empty
};

/// What stands where a column has null: a number (for lists: instead of their null elements; null lists
/// become empty), or a string.
using FillValue = std::variant<bool, int64_t, double, std::string>;

}  // namespace lockstep::data

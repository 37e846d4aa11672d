#include <algorithm>

#include <c10/util/Exception.h>

#include <lockstep/parquet/row_group_collate.h>

namespace lockstep::data {

RowGroupCollate::RowGroupCollate(const RowGroupCollateOptions& options) : options_(options) {
  TORCH_CHECK_VALUE(options_.batch_size > 0,
                    "RowGroupCollate: batch_size should be a positive integer, but is ", options_.batch_size);
}

std::vector<Table> RowGroupCollate::operator()(const std::vector<Table>& row_groups) const {
  if (row_groups.empty()) return {};
  Table rows = row_groups.size() == 1 ? row_groups.front() : Table::concat(row_groups);
  if (options_.sampler != nullptr) {
    const auto order = options_.sampler->row_order(row_groups.front().row_group(), rows.rows());
    if (!order.empty()) rows = rows.select(order);
  }
  std::vector<Table> batches;
  for (int64_t begin = 0; begin < rows.rows(); begin += options_.batch_size) {
    const int64_t end = std::min(rows.rows(), begin + options_.batch_size);
    if (options_.drop_last && end - begin < options_.batch_size) break;
    batches.push_back(rows.slice(begin, end));
  }
  return batches;
}

}  // namespace lockstep::data

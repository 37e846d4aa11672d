#include <algorithm>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/base/place_in_world.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/parquet/row_group_sampler.h>

namespace lockstep::data {

RowGroupSampler::RowGroupSampler(const ParquetDataset& dataset, const RowGroupSamplerOptions& options)
    : RowGroupSampler(dataset.row_counts(), options) {}

RowGroupSampler::RowGroupSampler(std::vector<int64_t> row_counts, const RowGroupSamplerOptions& options)
    : row_counts_(std::move(row_counts)),
      shuffle_(options.shuffle),
      shuffle_rows_(options.shuffle_rows),
      seed_(options.seed) {
  const auto negative =
      std::find_if(row_counts_.begin(), row_counts_.end(), [](int64_t rows) { return rows < 0; });
  TORCH_CHECK_VALUE(negative == row_counts_.end(), "RowGroupSampler: row group ",
                    negative - row_counts_.begin(), " has ", *negative, " rows; it should have 0 or more");
  const auto place = place_in_world("RowGroupSampler", options.num_replicas, options.rank);
  num_replicas_ = place.num_replicas;
  rank_ = place.rank;
}

std::vector<RowGroupSampler::Share> RowGroupSampler::assign() const {
  DistributedSampler order(static_cast<int64_t>(row_counts_.size()), /*num_replicas=*/1, /*rank=*/0, shuffle_,
                           seed_);
  order.set_epoch(epoch_);
  std::vector<Share> shares(static_cast<size_t>(num_replicas_));
  // A heap whose top is the next to get one: the rank with the fewest rows, then the lowest.
  const auto later = [&](size_t a, size_t b) {
    return std::pair(shares[a].rows, a) > std::pair(shares[b].rows, b);
  };
  std::vector<size_t> ranks(shares.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank] = rank;
  for (const int64_t row_group : order.indices()) {
    std::pop_heap(ranks.begin(), ranks.end(), later);
    Share& share = shares[ranks.back()];
    share.row_groups.push_back(row_group);
    share.rows += row_counts_[static_cast<size_t>(row_group)];
    std::push_heap(ranks.begin(), ranks.end(), later);
  }
  return shares;
}

RowGroupSampler::Share RowGroupSampler::mine() const {
  return std::move(assign()[static_cast<size_t>(rank_)]);
}

int64_t RowGroupSampler::size() const {
  return static_cast<int64_t>(mine().row_groups.size());
}

std::vector<int64_t> RowGroupSampler::indices() {
  return mine().row_groups;
}

int64_t RowGroupSampler::num_rows() const {
  return mine().rows;
}

int64_t RowGroupSampler::fewest_rows() const {
  const auto shares = assign();
  return std::min_element(shares.begin(), shares.end(),
                          [](const Share& a, const Share& b) { return a.rows < b.rows; })
      ->rows;
}

std::vector<int64_t> RowGroupSampler::row_order(int64_t row_group, int64_t rows) const {
  if (!shuffle_ || !shuffle_rows_ || rows == 0) return {};
  // Mixed, so that row group 1 in epoch 0 and row group 0 in epoch 1 have nothing in common.
  const uint64_t of_epoch = mix_bits(static_cast<uint64_t>(seed_) + static_cast<uint64_t>(epoch_));
  const uint64_t seed = mix_bits(of_epoch ^ mix_bits(static_cast<uint64_t>(row_group)));
  const auto order = at::randperm(rows, at::make_generator<at::CPUGeneratorImpl>(seed));
  const int64_t* first = order.const_data_ptr<int64_t>();
  return {first, first + rows};
}

}  // namespace lockstep::data

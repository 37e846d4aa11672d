#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>

namespace lockstep::fsdp::internal {
namespace {

std::vector<int64_t> sizes_with_rows(const at::Tensor& whole, int64_t rows) {
  auto sizes = whole.sizes().vec();
  if (sizes.empty()) sizes.push_back(rows);  // a number is one row
  sizes[0] = rows;
  return sizes;
}

/// A function of its own, so that it tells what it belongs to: see is_lower_precision_view().
void release_lower_precision_view(void* owner) {
  delete static_cast<std::shared_ptr<WeightMemory>*>(owner);
}

}  // namespace

bool is_lower_precision_view(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release_lower_precision_view;
}

ShardedWeights::ShardedWeights(std::shared_ptr<const ShardGroups> groups,
                               const std::vector<NamedTensor>& parameters,
                               const std::vector<WeightDtypes>& dtypes)
    : groups_(std::move(groups)) {
  const int rank = group()->getRank(), ranks = group()->getSize();
  std::vector<int64_t> own_bytes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const RowShape shape = RowShape::of(parameter.sizes().vec());
    const Rows own = rows_of(shape.rows, rank, ranks);
    const bool same = dtypes[i].seen == parameter.scalar_type();
    own_bytes.push_back(same ? 0
                             : own.size() * shape.row_numel * static_cast<int64_t>(parameter.element_size()));
    weights_.push_back({.name = name,
                        .parameter = parameter,
                        .dtypes = dtypes[i],
                        .sizes = parameter.sizes().vec(),
                        .shape = shape,
                        .own = own,
                        .trains = parameter.requires_grad(),
                        .shard = {},
                        .readable = {},
                        .writable = {}});
  }
  copy_offsets_ = aligned_offsets(own_bytes);
}

ShardedWeights::ShardedWeights(const std::vector<NamedTensor>& parameters,
                               const std::vector<WeightDtypes>& dtypes,
                               std::shared_ptr<const ShardGroups> groups)
    : ShardedWeights(std::move(groups), parameters, dtypes) {
  std::vector<int64_t> bytes;
  for (const ShardedWeight& weight : weights_) {
    bytes.push_back(weight.shape.numel() * static_cast<int64_t>(at::elementSize(weight.dtypes.seen)));
  }
  offsets_ = aligned_offsets(bytes);
  std::vector<transport::ReadOnlyView::Part> parts;
  for (size_t i = 0; i < weights_.size(); ++i) {
    parts.push_back({static_cast<size_t>(offsets_[i]), static_cast<size_t>(bytes[i]), part_name(i)});
  }
  memory_ = std::make_shared<WeightMemory>(groups_, static_cast<size_t>(offsets_.back()), std::move(parts));
}

std::string ShardedWeights::part_name(size_t index) const {
  return "parameter '" + weights_[index].name + "' of a FullyShardedDataParallel";
}

void ShardedWeights::allocate_copies() {
  const auto is_copied = [](const ShardedWeight& weight) {
    return weight.dtypes.seen != weight.parameter.scalar_type();
  };
  if (std::ranges::none_of(weights_, is_copied)) return;
  std::vector<transport::ReadOnlyView::Part> parts;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const int64_t end = copy_offsets_[i + 1];
    parts.push_back(
        {static_cast<size_t>(copy_offsets_[i]), static_cast<size_t>(end - copy_offsets_[i]), part_name(i)});
  }
  copies_ = std::make_shared<RowMemory>(static_cast<size_t>(copy_offsets_.back()), std::move(parts), group());
}

void ShardedWeights::move_values(bool of_rank_0) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < weights_.size(); ++i) {
    ShardedWeight& weight = weights_[i];
    at::Tensor whole = weight.parameter.detach();
    if (of_rank_0) {
      whole = whole.clone(at::MemoryFormat::Contiguous);
      std::vector<at::Tensor> tensors{whole};
      groups().all()->broadcast(tensors)->wait();
    }
    const auto shard_sizes = sizes_with_rows(whole, weight.own.size());
    const OwnRows place = own_rows_place(i);
    const auto rows_at = [&](std::byte* memory, at::ScalarType dtype, std::shared_ptr<void> owner) {
      return at::from_blob(
          memory, shard_sizes, [owner](void*) {}, at::TensorOptions(dtype));
    };
    const at::Tensor seen = rows_at(place.writable, weight.dtypes.seen, place.owner);
    if (weight.dtypes.seen == whole.scalar_type()) {
      weight.writable = seen;
      weight.readable = rows_at(place.readable, weight.dtypes.seen, place.owner);
    } else {
      weight.published = seen;
      weight.writable = rows_at(copies_->writable() + copy_offsets_[i], whole.scalar_type(), copies_);
      weight.readable = rows_at(copies_->view() + copy_offsets_[i], whole.scalar_type(), copies_);
    }
    const at::Tensor values = whole.contiguous()
                                  .view({weight.shape.rows, weight.shape.row_numel})
                                  .narrow(0, weight.own.begin, weight.own.size())
                                  .view(shard_sizes);
    weight.writable.copy_(values);
    // One rank's values for the rows on all hosts, as on one: what hosts have differently never becomes the same again.
    if (groups().replicas() && !of_rank_0 && weight.writable.numel() > 0) {
      std::vector<at::Tensor> rows{weight.writable};
      groups().replicas()->broadcast(rows)->wait();
    }
    if (weight.published.defined()) weight.published.copy_(weight.writable);
    weight.shard = weight.readable.detach();
    weight.shard.set_requires_grad(weight.trains);
    weight.parameter.set_data(in_view(i));
  }
  group()->barrier()->wait();
}

ShardedWeights::OwnRows ShardedWeights::own_rows_place(size_t index) const {
  const ShardedWeight& weight = weights_[index];
  const int64_t row_bytes =
      weight.shape.row_numel * static_cast<int64_t>(at::elementSize(weight.dtypes.seen));
  const int64_t offset = offsets_[index] + weight.own.begin * row_bytes;
  return {memory_->writable() + offset, memory_->view() + offset, memory_};
}

/// Where modules see a weight. Each is a storage of its own: of views of one, torch::save would write the whole.
at::Tensor ShardedWeights::in_view(size_t index) const {
  std::byte* const values = memory_->view() + offsets_[index];
  const ShardedWeight& weight = weights_[index];
  const at::TensorOptions options(weight.dtypes.seen);
  if (weight.published.defined()) {
    return at::for_blob(values, weight.sizes)
        .context(new std::shared_ptr<WeightMemory>(memory_), &release_lower_precision_view)
        .options(options)
        .make_tensor();
  }
  return at::from_blob(
      values, weight.sizes, [memory = memory_](void*) {}, options);
}

const ShardedWeight* ShardedWeights::find(const std::string& name) const {
  const auto found = std::ranges::find(weights_, name, &ShardedWeight::name);
  return found == weights_.end() ? nullptr : &*found;
}

void ShardedWeights::check_in_place() const {
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor& parameter = weights_[i].parameter;
    TORCH_CHECK(parameter.numel() == 0 || parameter.const_data_ptr() == memory_->view() + offsets_[i],
                "FullyShardedDataParallel: parameter '", weights_[i].name,
                "' is no longer where all ranks share it; something has given it other memory, such as "
                "module->to(): move and convert a module before it is wrapped, and load it by the wrapper");
  }
  check_frozen();
}

void ShardedWeights::check_frozen() const {
  for (const ShardedWeight& weight : weights_) {
    TORCH_CHECK(weight.trains || !weight.parameter.requires_grad(), "FullyShardedDataParallel: parameter '",
                weight.name,
                "' was frozen when it was wrapped, and requires gradients now, which nothing averages; set "
                "requires_grad before a module is wrapped");
  }
}

void ShardedWeights::put_shards(at::Tensor ShardedWeight::*place) {
  for (ShardedWeight& weight : weights_) weight.shard.set_data(weight.*place);
}

void ShardedWeights::write(const std::function<void()>& change) {
  struct BackToReadable {
    ShardedWeights& weights;
    ~BackToReadable() { weights.put_shards(&ShardedWeight::readable); }
  } back{*this};
  put_shards(&ShardedWeight::writable);
  change();
  const at::NoGradGuard no_grad;
  for (ShardedWeight& weight : weights_) {
    if (weight.published.defined()) weight.published.copy_(weight.shard);
    // An old graph that has saved the weight then fails with torch's own error. The other ranks' rows have changed, too.
    weight.parameter.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor ShardedWeights::part_of(size_t index, const at::Tensor& whole) const {
  const ShardedWeight& weight = weights_[index];
  TORCH_CHECK_VALUE(whole.sizes() == weight.sizes, "FullyShardedDataParallel: parameter '", weight.name,
                    "' has sizes ", at::IntArrayRef(weight.sizes), ", but a tensor of ", whole.sizes(),
                    " was given for it");
  return whole.detach()
      .contiguous()
      .view({weight.shape.rows, weight.shape.row_numel})
      .narrow(0, weight.own.begin, weight.own.size())
      .view(weight.shard.sizes());
}

at::Tensor ShardedWeights::own_rows(size_t index, const std::vector<ShardedTensor>& parts) const {
  const at::NoGradGuard no_grad;
  const ShardedWeight& weight = weights_[index];
  TORCH_CHECK_VALUE(!parts.empty(), "FullyShardedDataParallel: the state has no '", weight.name, "'");
  at::Tensor rows = at::empty({weight.own.size(), weight.shape.row_numel},
                              parts.front().local.options().requires_grad(false));
  std::vector<bool> found(static_cast<size_t>(weight.own.size()));
  for (const auto& [local, row, global_sizes] : parts) {
    const int64_t count = local.dim() == 0 ? 1 : local.size(0);
    TORCH_CHECK_VALUE(weight.sizes == global_sizes && row >= 0 && count <= weight.shape.rows - row &&
                          local.numel() == count * weight.shape.row_numel,
                      "FullyShardedDataParallel: parameter '", weight.name, "' has sizes ",
                      at::IntArrayRef(weight.sizes), ", but the state has a part of ", local.sizes(),
                      " from row ", row, " on, of ", at::IntArrayRef(global_sizes));
    const Rows common{std::max(row, weight.own.begin), std::min(row + count, weight.own.end)};
    if (common.size() <= 0) continue;
    rows.narrow(0, common.begin - weight.own.begin, common.size())
        .copy_(local.detach()
                   .reshape({count, weight.shape.row_numel})
                   .narrow(0, common.begin - row, common.size()));
    for (int64_t i = common.begin; i < common.end; ++i)
      found[static_cast<size_t>(i - weight.own.begin)] = true;
  }
  const auto missing = std::ranges::find(found, false);
  TORCH_CHECK_VALUE(missing == found.end(), "FullyShardedDataParallel: row ",
                    weight.own.begin + (missing - found.begin()), " of '", weight.name,
                    "' is in no part of the state; load the states of all ranks that wrote it");
  return rows.view(weight.shard.sizes());
}

void ShardedWeights::set_value(size_t index, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  weights_[index].shard.copy_(part_of(index, value));
}

at::Tensor ShardedWeights::gather(size_t index, const at::Tensor& part) const {
  const at::NoGradGuard no_grad;
  const ShardedWeight& weight = weights_[index];
  const int ranks = group()->getSize();
  const int64_t most = most_rows(weight.shape.rows, ranks);
  // All ranks but the last have equally many rows, so what lies behind the last row is what is too much.
  at::Tensor padded = at::empty({most, weight.shape.row_numel}, part.options().requires_grad(false)).zero_();
  padded.narrow(0, 0, weight.own.size())
      .copy_(part.detach().view({weight.own.size(), weight.shape.row_numel}));
  at::Tensor all = at::empty({ranks * most, weight.shape.row_numel}, padded.options());
  all_gather_into_tensor(all, padded, group());
  return all.narrow(0, 0, weight.shape.rows).contiguous().view(weight.sizes);
}

at::Tensor ShardedWeights::copy(size_t index, bool wanted) const {
  const ShardedWeight& weight = weights_[index];
  if (weight.published.defined()) return gather(index, weight.shard);
  return wanted ? weight.parameter.detach().clone() : at::Tensor();
}

// By gathering, for a rank that is faster may write its rows already while another copies.
void ShardedWeights::give_private_values() {
  for (size_t i = 0; i < weights_.size(); ++i) weights_[i].parameter.set_data(gather(i, weights_[i].shard));
}

void ShardedWeights::check_private_values() const {
  for (size_t i = 0; i < weights_.size(); ++i) (void)part_of(i, weights_[i].parameter);
}

void ShardedWeights::write_private_values_back() {
  for (size_t i = 0; i < weights_.size(); ++i) set_value(i, weights_[i].parameter);
}

void ShardedWeights::take_private_values() {
  for (size_t i = 0; i < weights_.size(); ++i) weights_[i].parameter.set_data(in_view(i));
}

}  // namespace lockstep::fsdp::internal

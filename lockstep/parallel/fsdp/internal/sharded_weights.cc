#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>

namespace lockstep::fsdp::internal {
namespace {

constexpr int64_t kScratchBytes = 1 << 20;

std::vector<int64_t> sizes_with_rows(const at::Tensor& whole, int64_t rows) {
  std::vector<int64_t> sizes = {rows};
  const at::IntArrayRef own = whole.sizes();
  if (!own.empty()) sizes.insert(sizes.end(), own.begin() + 1, own.end());  // a number is one row
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

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (tensor.device().type() == data.device().type()) {
    tensor.set_data(data);
  } else {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  }
}

ShardedWeights::ShardedWeights(std::shared_ptr<const ShardGroups> groups,
                               const std::vector<NamedTensor>& parameters,
                               const std::vector<WeightDtypes>& dtypes, c10::Device device,
                               const std::optional<std::filesystem::path>& offload)
    : groups_(std::move(groups)),
      device_(device),
      offload_(offload),
      scratch_(at::empty({kScratchBytes}, at::kByte)) {
  const int rank = group()->getRank(), ranks = group()->getSize();
  std::vector<int64_t> own_bytes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const RowShape shape = RowShape::of(parameter.sizes().vec());
    const Rows own = rows_of(shape.rows, rank, ranks);
    const bool same = dtypes[i].seen == dtypes[i].own;
    own_bytes.push_back(
        same ? 0 : own.size() * shape.row_numel * static_cast<int64_t>(at::elementSize(dtypes[i].own)));
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
                               std::shared_ptr<const ShardGroups> groups,
                               const std::optional<std::filesystem::path>& offload)
    : ShardedWeights(std::move(groups), parameters, dtypes, at::kCPU, offload) {
  std::vector<int64_t> bytes;
  for (const ShardedWeight& weight : weights_) {
    bytes.push_back(weight.shape.numel() * static_cast<int64_t>(at::elementSize(weight.dtypes.seen)));
  }
  offsets_ = aligned_offsets(bytes);
  std::vector<transport::ReadOnlyView::Part> parts;
  for (size_t i = 0; i < weights_.size(); ++i) {
    parts.push_back({static_cast<size_t>(offsets_[i]), static_cast<size_t>(bytes[i]), part_name(i)});
  }
  memory_ = std::make_shared<WeightMemory>(groups_, static_cast<size_t>(offsets_.back()), std::move(parts),
                                           offload);
}

std::string ShardedWeights::part_name(size_t index) const {
  return "parameter '" + weights_[index].name + "' of a FullyShardedDataParallel";
}

void ShardedWeights::allocate_copies() {
  const auto is_copied = [](const ShardedWeight& weight) { return weight.dtypes.seen != weight.dtypes.own; };
  if (std::ranges::none_of(weights_, is_copied)) return;
  std::vector<transport::ReadOnlyView::Part> parts;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const int64_t end = copy_offsets_[i + 1];
    parts.push_back(
        {static_cast<size_t>(copy_offsets_[i]), static_cast<size_t>(end - copy_offsets_[i]), part_name(i)});
  }
  copies_ = std::make_shared<RowMemory>(static_cast<size_t>(copy_offsets_.back()), std::move(parts), group(),
                                        rows_device(), offload_);
}

void ShardedWeights::make_shard(size_t index) {
  ShardedWeight& weight = weights_[index];
  const at::ScalarType own = weight.dtypes.own, seen = weight.dtypes.seen;
  const auto sizes = sizes_with_rows(weight.parameter, weight.own.size());
  const OwnRows place = own_rows_place(index);
  const auto rows_at = [&](std::byte* memory, at::ScalarType dtype, std::shared_ptr<void> owner) {
    return tensor_at(memory, sizes, at::TensorOptions(dtype).device(rows_device()), std::move(owner));
  };
  const at::Tensor there = rows_at(place.writable, seen, place.owner);
  if (seen == own) {
    weight.writable = there;
    weight.readable = rows_at(place.readable, seen, place.owner);
  } else {
    weight.published = there;
    weight.writable = rows_at(copies_->writable() + copy_offsets_[index], own, copies_);
    weight.readable = rows_at(copies_->view() + copy_offsets_[index], own, copies_);
  }
}

at::Tensor ShardedWeights::scratch(int64_t begin, int64_t numel, at::ScalarType dtype) const {
  const auto size = static_cast<int64_t>(at::elementSize(dtype));
  return scratch_.narrow(0, begin * size, numel * size).view(dtype);
}

/// In pieces, so that no other rank ever has the whole.
void ShardedWeights::take_rows_of_rank_0(size_t index) {
  const ShardedWeight& weight = weights_[index];
  at::Tensor own = weight.writable.view({-1});
  const at::ScalarType dtype = own.scalar_type();
  const int64_t numel = weight.shape.numel(), begin = weight.own.begin * weight.shape.row_numel;
  at::Tensor whole;
  if (groups().all()->getRank() == 0) whole = weight.parameter.detach().cpu().contiguous().view({-1});
  const int64_t most = kScratchBytes / own.element_size();
  for (int64_t done = 0; done < numel; done += most) {
    const int64_t count = std::min(most, numel - done);
    std::vector<at::Tensor> piece{whole.defined() ? whole.narrow(0, done, count) : scratch(0, count, dtype)};
    const CallSite site("FSDP's first values");
    groups().all()->broadcast(piece)->wait();
    const int64_t from = std::max(done, begin), to = std::min(done + count, begin + own.numel());
    if (from < to) own.narrow(0, from - begin, to - from).copy_(piece[0].narrow(0, from - done, to - from));
  }
}

void ShardedWeights::take_own_rows(size_t index) {
  const ShardedWeight& weight = weights_[index];
  at::Tensor rows = weight.writable;
  rows.copy_(weight.parameter.detach()
                 .cpu()
                 .contiguous()
                 .view({weight.shape.rows, weight.shape.row_numel})
                 .narrow(0, weight.own.begin, weight.own.size())
                 .view(rows.sizes()));
  // One rank's values for the rows on all hosts, as on one: what hosts have differently never becomes the same again.
  if (groups().replicas() && rows.numel() > 0) {
    std::vector<at::Tensor> tensors{rows};
    const CallSite site("FSDP's first values");
    groups().replicas()->broadcast(tensors)->wait();
  }
}

void ShardedWeights::move_value(size_t index, bool of_rank_0) {
  const at::NoGradGuard no_grad;
  make_shard(index);
  if (of_rank_0) {
    take_rows_of_rank_0(index);
  } else {
    take_own_rows(index);
  }
  put_in_place(index);
}

void ShardedWeights::take_rows(size_t index, const at::Tensor& own_rows) {
  const at::NoGradGuard no_grad;
  make_shard(index);
  weights_[index].writable.copy_(own_rows);
  put_in_place(index);
}

void ShardedWeights::put_in_place(size_t index) {
  ShardedWeight& weight = weights_[index];
  if (weight.published.defined()) weight.published.copy_(weight.writable);
  weight.shard = weight.readable.detach();
  weight.shard.set_requires_grad(weight.trains);
  replace_data(weight.parameter, in_view(index));
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
  return tensor_at(values, weight.sizes, options, memory_);
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

at::Tensor ShardedWeights::empty_whole(size_t index, std::optional<at::ScalarType> dtype,
                                       c10::Device device) const {
  const ShardedWeight& weight = weights_[index];
  return at::empty(weight.sizes,
                   at::TensorOptions(dtype.value_or(weight.shard.scalar_type())).device(device));
}

void ShardedWeights::gather(size_t index, const at::Tensor& part, const at::Tensor& whole) const {
  const at::NoGradGuard no_grad;
  const RowShape& shape = weights_[index].shape;
  const int ranks = group()->getSize();
  const int64_t most = most_rows(shape.rows, ranks) * shape.row_numel;  // elements of a rank
  const int64_t most_at_once = kScratchBytes / (ranks + 1) / part.element_size();
  const at::Tensor own = part.detach().view({-1});
  at::Tensor all;
  if (whole.defined()) all = whole.view({-1});
  for (int64_t done = 0; done < most; done += most_at_once) {
    const int64_t count = std::min(most_at_once, most - done);
    const auto there = [&](int64_t numel) { return std::clamp<int64_t>(numel - done, 0, count); };
    at::Tensor mine = scratch(0, count, part.scalar_type());
    at::Tensor theirs = scratch(count, ranks * count, part.scalar_type());
    if (const int64_t here = there(own.numel()); here > 0) {
      mine.narrow(0, 0, here).copy_(own.narrow(0, done, here));
    }
    all_gather_into_tensor(theirs, mine, group());
    for (int rank = 0; rank < ranks && all.defined(); ++rank) {
      const Rows rows = rows_of(shape.rows, rank, ranks);
      const int64_t here = there(rows.size() * shape.row_numel);
      if (here == 0) continue;
      all.narrow(0, rows.begin * shape.row_numel + done, here).copy_(theirs.narrow(0, rank * count, here));
    }
  }
}

void ShardedWeights::copy(size_t index, const at::Tensor& whole) const {
  const at::NoGradGuard no_grad;
  const ShardedWeight& weight = weights_[index];
  if (weight.published.defined()) {
    gather(index, weight.shard, whole);
  } else if (whole.defined()) {
    whole.copy_(weight.parameter.detach());
  }
}

void ShardedWeights::give_private_values(const std::vector<at::Tensor>& memory) {
  for (size_t i = 0; i < weights_.size(); ++i) {
    copy(i, memory[i]);
    weights_[i].parameter.set_data(memory[i]);
  }
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

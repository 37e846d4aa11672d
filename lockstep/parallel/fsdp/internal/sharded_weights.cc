#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>

namespace lockstep::fsdp::internal {
namespace {

at::ScalarType seen_dtype(const at::Tensor& parameter, const MixedPrecision& precision) {
  return parameter.is_floating_point() ? precision.param_dtype.value_or(parameter.scalar_type())
                                       : parameter.scalar_type();
}

std::vector<int64_t> sizes_with_rows(const at::Tensor& whole, int64_t rows) {
  auto sizes = whole.sizes().vec();
  if (sizes.empty()) sizes.push_back(rows);  // a number is one row
  sizes[0] = rows;
  return sizes;
}

}  // namespace

ShardedWeights::ShardedWeights(const std::vector<NamedTensor>& parameters, const ProcessGroup& parent,
                               const FullyShardedDataParallelOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> bytes;
  for (const auto& [name, parameter] : parameters) {
    bytes.push_back(parameter.numel() *
                    static_cast<int64_t>(at::elementSize(seen_dtype(parameter, options.mixed_precision))));
  }
  offsets_ = aligned_offsets(bytes);
  std::vector<transport::ReadOnlyView::Part> parts;
  for (size_t i = 0; i < parameters.size(); ++i) {
    parts.push_back({static_cast<size_t>(offsets_[i]), static_cast<size_t>(bytes[i]),
                     "parameter '" + parameters[i].first + "' of a FullyShardedDataParallel"});
  }
  memory_ = std::make_shared<WeightMemory>(parent, static_cast<size_t>(offsets_.back()), std::move(parts));
  const int rank = group()->getRank(), ranks = group()->getSize();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const at::ScalarType dtype = seen_dtype(parameter, options.mixed_precision);
    const RowShape shape = RowShape::of(parameter.sizes().vec());
    ShardedWeight weight{.name = name,
                         .parameter = parameter,
                         .shape = shape,
                         .own = rows_of(shape.rows, rank, ranks),
                         .shard = {}};
    at::Tensor whole = parameter.detach();
    if (options.sync_module_states) {
      whole = whole.clone(at::MemoryFormat::Contiguous);
      std::vector<at::Tensor> tensors{whole};
      group()->broadcast(tensors)->wait();
    }
    whole = whole.contiguous().view({weight.shape.rows, weight.shape.row_numel});
    const at::Tensor values = whole.narrow(0, weight.own.begin, weight.own.size());
    std::byte* const rows =
        memory_->writable() + offsets_[i] +
        weight.own.begin * weight.shape.row_numel * static_cast<int64_t>(at::elementSize(dtype));
    const auto shard_sizes = sizes_with_rows(parameter, weight.own.size());
    const at::Tensor in_memory = at::from_blob(
        rows, shard_sizes, [memory = memory_](void*) {}, at::TensorOptions(dtype));
    in_memory.copy_(values.view(shard_sizes));
    if (dtype == parameter.scalar_type()) {
      weight.shard = in_memory;
    } else {
      weight.shard = values.view(shard_sizes).clone();
      weight.published = in_memory;
    }
    weight.shard.set_requires_grad(parameter.requires_grad());
    weights_.push_back(std::move(weight));
    weights_.back().parameter.set_data(in_view(i));
  }
  group()->barrier()->wait();
}

/// Where modules see a weight. Each is a storage of its own: of views of one, torch::save would write the whole.
at::Tensor ShardedWeights::in_view(size_t index) const {
  const ShardedWeight& weight = weights_[index];
  const at::ScalarType dtype =
      weight.published.defined() ? weight.published.scalar_type() : weight.shard.scalar_type();
  return at::from_blob(
      memory_->view() + offsets_[index], weight.parameter.sizes(), [memory = memory_](void*) {},
      at::TensorOptions(dtype));
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
                "module->to(): move and "
                "convert a module before it is wrapped, and load it by the wrapper");
  }
}

void ShardedWeights::publish() {
  const at::NoGradGuard no_grad;
  for (ShardedWeight& weight : weights_) {
    if (weight.published.defined()) weight.published.copy_(weight.shard);
    // An old graph that has saved the weight then fails with torch's own error. The other ranks' rows have changed, too.
    weight.parameter.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor ShardedWeights::part_of(size_t index, const at::Tensor& whole) const {
  const ShardedWeight& weight = weights_[index];
  TORCH_CHECK_VALUE(whole.sizes() == weight.parameter.sizes(), "FullyShardedDataParallel: parameter '",
                    weight.name, "' has sizes ", weight.parameter.sizes(), ", but a tensor of ",
                    whole.sizes(), " was given for it");
  return whole.detach()
      .contiguous()
      .view({weight.shape.rows, weight.shape.row_numel})
      .narrow(0, weight.own.begin, weight.own.size())
      .view(weight.shard.sizes());
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
  return all.narrow(0, 0, weight.shape.rows).contiguous().view(weight.parameter.sizes());
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

void ShardedWeights::take_private_values(bool writeback) {
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (writeback) set_value(i, weights_[i].parameter);
    weights_[i].parameter.set_data(in_view(i));
  }
}

}  // namespace lockstep::fsdp::internal

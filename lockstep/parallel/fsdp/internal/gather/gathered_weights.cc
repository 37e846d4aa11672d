#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/device/streams.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_weights.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>

namespace lockstep::fsdp::internal {
namespace {

/// For StorageImpl::clear_data_ptr_access_error_msg_(), which torch 2.11 does not have.
template <auto kMember>
struct ThrowsOnAccess {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*kMember; }
};
bool& throws_on_access(c10::StorageImpl& storage);
template struct ThrowsOnAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

at::Tensor bytes_at(void* memory, int64_t bytes, c10::Device device) {
  return tensor_at(memory, bytes, at::TensorOptions(at::kByte).device(device));
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

/// Also where data_ptr() would throw.
const at::DataPtr& data_of(const at::Tensor& tensor) {
  return storage_of(tensor)->_mutable_data_ptr_no_checks();
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

std::string text_of_freed(const std::string& name) {
  return "FullyShardedDataParallel: parameter '" + name +
         "' has no values here: ranks gather them in forward() and backward(), and free them afterwards; "
         "summon_full_params() and full_state_dict() have them";
}

}  // namespace

bool is_gathered_parameter(const at::Tensor& parameter) {
  return parameter.has_storage() &&
         is_watched(parameter.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
}

GatheredWeights::GatheredWeights(const std::vector<NamedTensor>& parameters,
                                 const std::vector<WeightDtypes>& dtypes,
                                 std::shared_ptr<const ShardGroups> groups, c10::Device device,
                                 std::vector<std::vector<size_t>> units, std::vector<std::string> names,
                                 std::optional<size_t> most_in_use,
                                 const std::optional<std::filesystem::path>& offload)
    : ShardedWeights(std::move(groups), parameters, dtypes, device, offload),
      unit_of_(parameters.size()),
      slot_(std::make_shared<AccessListenerSlot>()),
      most_in_use_(most_in_use) {
  if (!device.is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
  std::vector<int64_t> own_bytes;
  for (size_t weight = 0; weight < parameters.size(); ++weight) own_bytes.push_back(most_bytes(weight));
  own_offsets_ = aligned_offsets(own_bytes);
  std::vector<transport::ReadOnlyView::Part> parts;
  for (size_t weight = 0; weight < parameters.size(); ++weight) {
    parts.push_back({static_cast<size_t>(own_offsets_[weight]), static_cast<size_t>(own_bytes[weight]),
                     part_name(weight)});
  }
  own_ = std::make_shared<RowMemory>(static_cast<size_t>(own_offsets_.back()), std::move(parts), group(),
                                     rows_device(), offload);

  const auto ranks = static_cast<size_t>(group()->getSize());
  for (size_t unit = 0; unit < units.size(); ++unit) {
    std::vector<int64_t> bytes;
    for (const size_t weight : units[unit]) {
      unit_of_[weight] = unit;
      bytes.push_back(static_cast<int64_t>(ranks) * most_bytes(weight));
    }
    units_.push_back({.name = std::move(names[unit]),
                      .weights = std::move(units[unit]),
                      .offsets = aligned_offsets(bytes),
                      .headers = std::vector<Header>(ranks)});
  }
  for (size_t weight = 0; weight < parameters.size(); ++weight) {
    parameters_.push_back(
        at::empty(all()[weight].sizes, at::TensorOptions(all()[weight].dtypes.seen).device(device)));
    storage_of(parameters_.back())->set_resizable(false);
    set_memory(weight, nullptr);
    refuse_access(weight, text_of_freed(all()[weight].name));
  }
}

GatheredWeights::~GatheredWeights() {
  for (Unit& unit : units_) {
    try {
      // Headers lie in the unit. Of an aborted group waiting returns at once.
      if (const Work work = std::exchange(unit.header_work, {})) work->wait();
      // What a device can't end is not waited for; it was aborted.
      if (stream_ && !refusal_.empty()) continue;
      if (const Work work = std::exchange(unit.work, {})) work->wait();
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kDebug) << "a gather of a model that is gone: " << text_of(error);
    }
  }
  for (size_t weight = 0; weight < parameters_.size(); ++weight) {
    set_memory(weight, nullptr);
    refuse_access(weight,
                  "FullyShardedDataParallel: parameter '" + all()[weight].name +
                      "' has no values any more: its wrapper, which gathered them, is gone; make the module "
                      "anew, and load a full_state_dict() taken before");
  }
}

bool GatheredWeights::has_frozen(size_t unit) const {
  return std::ranges::any_of(units_[unit].weights, [this](size_t weight) { return !all()[weight].trains; });
}

int64_t GatheredWeights::row_bytes(size_t weight) const {
  return all()[weight].shape.row_numel * static_cast<int64_t>(at::elementSize(all()[weight].dtypes.seen));
}

int64_t GatheredWeights::most_bytes(size_t weight) const {
  return most_rows(all()[weight].shape.rows, group()->getSize()) * row_bytes(weight);
}

ShardedWeights::OwnRows GatheredWeights::own_rows_place(size_t index) const {
  return {own_->writable() + own_offsets_[index], own_->view() + own_offsets_[index], own_};
}

void GatheredWeights::set_memory(size_t weight, void* memory) {
  c10::StorageImpl* const storage = storage_of(parameters_[weight]);
  throws_on_access(*storage) = false;
  storage->set_data_ptr_noswap(
      watched_data(memory, device(), slot_, unit_of_[weight]));  // takes note of that, too
}

void GatheredWeights::refuse_access(size_t weight, const std::string& text) {
  // Despite its name it releases nothing; from then on data_ptr() throws.
  storage_of(parameters_[weight])->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}

void GatheredWeights::start(size_t unit, int64_t note, bool early) {
  Unit& started = units_[unit];
  failpoint::here("fsdp_gather");
  await_room();
  const c10::OptionalStreamGuard gathering(stream_);
  started.memory = at::empty({started.offsets.back()}, at::TensorOptions(at::kByte).device(device()));
  started.header = {static_cast<int64_t>(unit), note};
  const int64_t ranks = group()->getSize();
  const at::Tensor headers = bytes_at(started.headers.data(), ranks * int64_t{sizeof(Header)}, at::kCPU);
  const at::Tensor header = bytes_at(started.header.data(), sizeof(Header), at::kCPU);
  std::vector<at::Tensor> wholes;
  std::vector<at::Tensor>& parts = started.parts;
  parts.clear();
  auto* const memory = static_cast<std::byte*>(started.memory.mutable_data_ptr());
  for (size_t i = 0; i < started.weights.size(); ++i) {
    const size_t weight = started.weights[i];
    if (most_bytes(weight) == 0) continue;
    wholes.push_back(bytes_at(memory + started.offsets[i], ranks * most_bytes(weight), device()));
    parts.push_back(
        bytes_at(own_->writable() + own_offsets_[weight], most_bytes(weight), rows_device()).to(device()));
  }
  try {
    if (device().is_cpu()) {
      wholes.push_back(headers);
      parts.push_back(header);
      started.work = all_gather_into_tensor_coalesced(wholes, parts, groups().gathers(), /*async_op=*/early);
    } else {
      started.header_work = all_gather_into_tensor(headers, header, groups().gathers(), /*async_op=*/true);
      if (wholes.empty()) return;
      started.work = all_gather_into_tensor_coalesced(wholes, parts, groups().gathers(), /*async_op=*/true);
    }
  } catch (...) {
    rethrow_with_context("while the parameters of '" + started.name + "' were gathered");
  }
}

void GatheredWeights::begin_pass() {
  if (stream_) order_streams(*current_stream(device()), *stream_);
}

/// The host frees units before the device has used them: their memory is not free until then.
void GatheredWeights::await_room() {
  while (most_in_use_ && freed_.size() >= *most_in_use_) {
    freed_.front().synchronize();
    freed_.pop_front();
  }
}

/// Throws when a rank has gathered another unit.
void GatheredWeights::check_headers(size_t unit) const {
  for (size_t rank = 0; rank < units_[unit].headers.size(); ++rank) {
    const auto other = static_cast<size_t>(units_[unit].headers[rank][0]);
    TORCH_CHECK_WITH(DistBackendError, other == unit,
                     "FullyShardedDataParallel: this rank needs the parameters of '", units_[unit].name,
                     "' next, but rank ", get_global_rank(group(), static_cast<int>(rank)), " those of '",
                     other < units_.size() ? units_[other].name : "?",
                     "'; where parameters are gathered, all ranks must use them in the same order, in "
                     "evaluation too");
  }
}

int64_t GatheredWeights::finish(size_t unit) {
  Unit& gathered = units_[unit];
  const auto wait = [&gathered](Work& started) {
    try {
      if (const Work work = std::exchange(started, {})) work->wait();
    } catch (...) {
      rethrow_with_context("while the parameters of '" + gathered.name + "' were gathered");
    }
  };
  wait(device().is_cpu() ? gathered.work : gathered.header_work);
  check_headers(unit);  // before a device waits for what others perhaps never send
  wait(gathered.work);
  gathered.parts.clear();
  gathered.ready_on = current_stream(device());
  lockstep::use_on_current_stream(gathered.memory);
  const auto least =
      std::ranges::min_element(gathered.headers, {}, [](const Header& header) { return header[1]; });
  auto* const memory = static_cast<std::byte*>(gathered.memory.mutable_data_ptr());
  gathered.versions.clear();
  for (size_t i = 0; i < gathered.weights.size(); ++i) {
    const ShardedWeight& weight = all()[gathered.weights[i]];
    set_memory(gathered.weights[i], memory + gathered.offsets[i]);
    gathered.versions.push_back(version_of(weight.parameter));
  }
  return (*least)[1];
}

void GatheredWeights::use_on_current_stream(size_t unit) {
  const auto stream = current_stream(device());
  const Unit& used = units_[unit];
  if (!stream || !used.memory.defined() || stream == used.ready_on) return;
  order_streams(*used.ready_on, *stream);
  lockstep::use_on_current_stream(used.memory);
}

void GatheredWeights::free(size_t unit) {
  Unit& freed = units_[unit];
  for (size_t i = 0; i < freed.weights.size(); ++i) {
    const ShardedWeight& weight = all()[freed.weights[i]];
    set_memory(freed.weights[i], nullptr);
    refuse_access(freed.weights[i], refusal_.empty() ? text_of_freed(weight.name) : refusal_);
  }
  freed.memory.reset();
  if (stream_ && most_in_use_) {
    freed_.emplace_back(device().type());
    freed_.back().record(*current_stream(device()));
  }
  for (size_t i = 0; i < freed.weights.size(); ++i) {
    const ShardedWeight& weight = all()[freed.weights[i]];
    TORCH_CHECK(version_of(weight.parameter) == freed.versions[i], "FullyShardedDataParallel: parameter '",
                weight.name,
                "' was written to while it was gathered, which is lost: parameters change in step() and "
                "summon_full_params() alone");
  }
}

void GatheredWeights::refuse(const std::string& text) {
  refusal_ = text;
  for (const Unit& unit : units_) {
    for (const size_t weight : unit.weights) {
      if (data_of(parameters_[weight]).get() == nullptr) refuse_access(weight, text);
    }
  }
}

void GatheredWeights::check_in_place() const {
  for (size_t i = 0; i < all().size(); ++i) {
    const at::Tensor& parameter = all()[i].parameter;
    TORCH_CHECK(parameter.has_storage() && storage_of(parameter) == storage_of(parameters_[i]),
                "FullyShardedDataParallel: parameter '", all()[i].name,
                "' is no longer the one that is gathered; something has given it other memory, such as "
                "module->to(): move and convert a module before it is wrapped, and load it by the wrapper");
  }
  check_frozen();
}

void GatheredWeights::copy(size_t index, const at::Tensor& whole) const {
  gather(index, all()[index].shard, whole);
}

}  // namespace lockstep::fsdp::internal

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/serialization/pickle/object_pickle.h>

/// Each function is two operations on tensors: first the sizes of the pickles, then the pickles, padded to
/// the largest where ranks' tensors must have one size. A rank that can't pickle its object says so with a
/// size of kNoObject, so that no rank waits for what won't come.
namespace lockstep {
namespace {

constexpr int64_t kNoObject = -1;

/// A call's group, and the names in its messages.
struct ObjectCall {
  const char* name;
  ProcessGroup group;
  std::source_location caller;

  ObjectCall(const char* name, const ProcessGroup& members, const std::source_location& caller)
      : name(name), group(members), caller(caller) {
    TORCH_CHECK_VALUE(is_member(members), name,
                      ": this rank is not a member of the group; leave the call to its members");
    if (!group) group = default_group();
  }

  int rank() const { return group->getRank(); }
  int size() const { return group->getSize(); }
};

/// One rank's pickles, or why there are none.
struct Pickles {
  std::vector<std::string> bytes;
  std::vector<int64_t> sizes;  // kNoObject if one of them failed
  std::exception_ptr failure;

  explicit Pickles(c10::ArrayRef<c10::IValue> objects) : sizes(objects.size(), kNoObject) {
    try {
      for (const c10::IValue& object : objects) bytes.push_back(pickle_object(object));
      std::transform(bytes.begin(), bytes.end(), sizes.begin(),
                     [](const auto& text) { return std::ssize(text); });
    } catch (...) {  // whatever it was: the others must not wait for it
      failure = std::current_exception();
    }
  }

  void rethrow() const {
    if (failure) std::rethrow_exception(failure);
  }
};

at::Tensor to_tensor(const std::vector<int64_t>& values) {
  at::Tensor tensor = at::empty({std::ssize(values)}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::vector<int64_t> to_vector(const at::Tensor& sizes) {
  const auto* first = sizes.const_data_ptr<int64_t>();
  return {first, first + sizes.numel()};
}

/// The pickles one after the other, then zeros up to `size` bytes.
at::Tensor to_bytes(c10::ArrayRef<std::string> pickles, int64_t size) {
  at::Tensor tensor = at::empty({size}, at::kByte);
  auto* end = tensor.mutable_data_ptr<uint8_t>();
  for (const std::string& pickle : pickles) end = std::copy(pickle.begin(), pickle.end(), end);
  std::fill(end, tensor.mutable_data_ptr<uint8_t>() + size, uint8_t{0});
  return tensor;
}

c10::IValue to_value(const at::Tensor& bytes, int64_t offset, int64_t size, const ObjectCall& call,
                     int global_rank) {
  const auto* first = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()) + offset;
  return unpickle_object({first, static_cast<size_t>(size)},
                         std::string(call.name) + ": the object of rank " + std::to_string(global_rank));
}

/// Throws for sizes that no pickle has. `senders`: the global rank that each size came from.
void check_sizes(const std::vector<int64_t>& sizes, const std::vector<int>& senders, const ObjectCall& call) {
  std::vector<int> without;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == kNoObject) without.push_back(senders[i]);
  }
  if (!without.empty()) {
    std::sort(without.begin(), without.end());
    without.erase(std::unique(without.begin(), without.end()), without.end());
    C10_THROW_ERROR(DistBackendError, std::string(call.name) + ": " + name_ranks(without) +
                                          " could not pickle the object to send; the error there says why");
  }
  const auto limit = static_cast<int64_t>(max_object_bytes());
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] >= 0 && sizes[i] <= limit) continue;
    C10_THROW_ERROR(DistBackendError,
                    std::string(call.name) + ": rank " + std::to_string(senders[i]) +
                        " announces an object of " + std::to_string(sizes[i]) + " bytes; up to " +
                        format_bytes(limit) +
                        " are allowed (LOCKSTEP_MAX_OBJECT_BYTES, which must be the same on all ranks)");
  }
}

int64_t sum_of(
    const std::vector<int64_t>& sizes) {  // each is at most max_object_bytes(), so it can't overflow
  int64_t sum = 0;
  for (const int64_t size : sizes) sum += size;
  return sum;
}

/// The size of each rank's pickle. Throws if one has none.
std::vector<int64_t> gather_sizes(const Pickles& mine, const ObjectCall& call) {
  const at::Tensor sizes = at::empty({call.size(), 1}, at::kLong);
  all_gather(sizes.unbind(0), to_tensor(mine.sizes), call.group, false, call.caller);
  mine.rethrow();
  check_sizes(to_vector(sizes.view({-1})), get_process_group_ranks(call.group), call);
  return to_vector(sizes.view({-1}));
}

/// Row r of `rows` is rank r's padded pickle.
void read_rows(const at::Tensor& rows, const std::vector<int64_t>& sizes, std::vector<c10::IValue>& objects,
               const ObjectCall& call) {
  const auto ranks = get_process_group_ranks(call.group);
  std::vector<c10::IValue> read;  // all or none, when one can't be read
  for (int r = 0; r < call.size(); ++r) {
    const auto row = static_cast<size_t>(r);
    read.push_back(to_value(rows, r * rows.size(1), sizes[row], call, ranks[row]));
  }
  std::move(read.begin(), read.end(), objects.begin());
}

/// The objects of a list that came from one rank, one after the other.
std::vector<c10::IValue> read_list(const at::Tensor& bytes, const std::vector<int64_t>& sizes,
                                   const ObjectCall& call, int global_rank) {
  std::vector<c10::IValue> objects;
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    objects.push_back(to_value(bytes, offset, size, call, global_rank));
    offset += size;
  }
  return objects;
}

void check_length(const std::vector<c10::IValue>& list, const char* argument, const ObjectCall& call) {
  TORCH_CHECK_VALUE(std::ssize(list) == call.size(), call.name, ": ", argument, " has ", list.size(),
                    " elements, but the group has ", call.size(), " ranks; give it one for each");
}

void check_not_empty(const std::vector<c10::IValue>& list, const char* argument, const ObjectCall& call) {
  TORCH_CHECK_VALUE(!list.empty(), call.name, ": expected argument ", argument,
                    " to be a list of size at least 1");
}

void check_not_self(int global_rank, const char* kind, const ObjectCall& call) {
  TORCH_CHECK_VALUE(get_group_rank(call.group, global_rank) != call.rank(), call.name, ": invalid ", kind,
                    " rank: ", kind, " rank ", global_rank, " should not be the rank of the current process");
}

}  // namespace

void all_gather_object(std::vector<c10::IValue>& object_list, const c10::IValue& obj,
                       const ProcessGroup& group, const std::source_location& caller) {
  const ObjectCall call("all_gather_object", group, caller);
  check_length(object_list, "object_list", call);
  const Pickles mine(obj);
  const auto sizes = gather_sizes(mine, call);
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  const at::Tensor rows = at::empty({call.size(), largest}, at::kByte);
  all_gather(rows.unbind(0), to_bytes(mine.bytes, largest), call.group, false, caller);
  read_rows(rows, sizes, object_list, call);
}

void gather_object(const c10::IValue& obj, std::vector<c10::IValue>* object_gather_list, int dst,
                   const ProcessGroup& group, const std::source_location& caller) {
  const ObjectCall call("gather_object", group, caller);
  const bool is_dst = get_group_rank(call.group, dst) == call.rank();
  TORCH_CHECK_VALUE(!is_dst || object_gather_list,
                    "gather_object: argument object_gather_list must be specified on destination rank ", dst);
  TORCH_CHECK_VALUE(
      is_dst || !object_gather_list || object_gather_list->empty(),
      "gather_object: argument object_gather_list must NOT be specified on non-destination ranks; "
      "the destination is rank ",
      dst);
  if (is_dst) check_length(*object_gather_list, "object_gather_list", call);
  const Pickles mine(obj);
  const auto sizes = gather_sizes(mine, call);
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  const at::Tensor rows = at::empty({is_dst ? call.size() : 0, largest}, at::kByte);
  gather(to_bytes(mine.bytes, largest), rows.unbind(0), dst, call.group, false, caller);
  if (is_dst) read_rows(rows, sizes, *object_gather_list, call);
}

void broadcast_object_list(std::vector<c10::IValue>& object_list, int src, const ProcessGroup& group,
                           const std::source_location& caller) {
  const ObjectCall call("broadcast_object_list", group, caller);
  check_not_empty(object_list, "object_list", call);
  const bool is_src = get_group_rank(call.group, src) == call.rank();
  const Pickles mine(is_src ? c10::ArrayRef<c10::IValue>(object_list) : c10::ArrayRef<c10::IValue>());
  const at::Tensor announced =
      is_src ? to_tensor(mine.sizes) : at::empty({std::ssize(object_list)}, at::kLong);
  broadcast(announced, src, call.group, false, caller);
  mine.rethrow();
  const auto sizes = to_vector(announced);
  check_sizes(sizes, std::vector<int>(sizes.size(), src), call);
  const at::Tensor bytes =
      is_src ? to_bytes(mine.bytes, sum_of(sizes)) : at::empty({sum_of(sizes)}, at::kByte);
  broadcast(bytes, src, call.group, false, caller);
  if (!is_src) object_list = read_list(bytes, sizes, call, src);
}

void scatter_object_list(std::vector<c10::IValue>& scatter_object_output_list,
                         const std::vector<c10::IValue>& scatter_object_input_list, int src,
                         const ProcessGroup& group, const std::source_location& caller) {
  const ObjectCall call("scatter_object_list", group, caller);
  check_not_empty(scatter_object_output_list, "scatter_object_output_list", call);
  const bool is_src = get_group_rank(call.group, src) == call.rank();
  TORCH_CHECK_VALUE(
      is_src || scatter_object_input_list.empty(),
      "scatter_object_list: argument scatter_object_input_list must NOT be specified on non-source "
      "ranks; the source is rank ",
      src);
  if (is_src) check_length(scatter_object_input_list, "scatter_object_input_list", call);
  const Pickles mine(scatter_object_input_list);
  // Like PyTorch: the largest size to all, the padded pickles, then each rank's own size.
  const auto largest = [&] { return *std::max_element(mine.sizes.begin(), mine.sizes.end()); };
  const at::Tensor announced = to_tensor({is_src ? largest() : 0});
  broadcast(announced, src, call.group, false, caller);
  mine.rethrow();
  check_sizes(to_vector(announced), {src}, call);
  const int64_t row_size = to_vector(announced)[0];
  std::vector<at::Tensor> rows, sizes;
  for (size_t r = 0; r < mine.bytes.size(); ++r) {
    rows.push_back(to_bytes(mine.bytes[r], row_size));
    sizes.push_back(to_tensor({mine.sizes[r]}));
  }
  const at::Tensor row = at::empty({row_size}, at::kByte), size = at::empty({1}, at::kLong);
  scatter(row, rows, src, call.group, false, caller);
  scatter(size, sizes, src, call.group, false, caller);
  const int64_t own_size = to_vector(size)[0];
  check_sizes({own_size}, {src}, call);
  if (own_size > row_size) {
    C10_THROW_ERROR(DistBackendError, "scatter_object_list: rank " + std::to_string(src) +
                                          " announces an object of " + std::to_string(own_size) +
                                          " bytes in a buffer of " + std::to_string(row_size));
  }
  scatter_object_output_list[0] = to_value(row, 0, own_size, call, src);
}

void send_object_list(const std::vector<c10::IValue>& object_list, int dst, const ProcessGroup& group,
                      const std::source_location& caller) {
  const ObjectCall call("send_object_list", group, caller);
  check_not_empty(object_list, "object_list", call);
  check_not_self(dst, "destination", call);
  const Pickles mine(object_list);
  send(to_tensor(mine.sizes), dst, call.group, /*tag=*/0, caller);
  mine.rethrow();
  send(to_bytes(mine.bytes, sum_of(mine.sizes)), dst, call.group, /*tag=*/0, caller);
}

int recv_object_list(std::vector<c10::IValue>& object_list, std::optional<int> src, const ProcessGroup& group,
                     const std::source_location& caller) {
  const ObjectCall call("recv_object_list", group, caller);
  check_not_empty(object_list, "object_list", call);
  if (src) check_not_self(*src, "source", call);
  const at::Tensor announced = at::empty({std::ssize(object_list)}, at::kLong);
  const int sender = recv(announced, src, call.group, /*tag=*/0, caller);
  const auto sizes = to_vector(announced);
  check_sizes(sizes, std::vector<int>(sizes.size(), sender), call);
  const at::Tensor bytes = at::empty({sum_of(sizes)}, at::kByte);
  recv(bytes, sender, call.group, /*tag=*/0, caller);  // from any source, PyTorch may mix two senders here
  object_list = read_list(bytes, sizes, call, sender);
  return sender;
}

}  // namespace lockstep

#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <source_location>
#include <vector>

#include <ATen/core/ivalue.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/serialization/object_conversion.h>

/// Collectives of objects instead of tensors, as c10::IValue: None, bool, int64_t, double, complex, strings,
/// CPU tensors, devices, and lists, dicts and tuples of them to any depth up to 200. torch/distributed/
/// distributed_c10d.py, the *_object functions. to_object() and from_object() (object_conversion.h) turn the
/// standard library's types into objects and back; what arrives are lists and dicts of elements of any type.
///
/// On the wire objects are pickles, and the calls below them are PyTorch's, so that ranks in Python could
/// read them; reading runs no code, whatever the bytes say. Tensors come without their gradient, strings that
/// are not UTF-8 are bytes in Python. Objects may differ in kind and size from rank to rank; one pickle has
/// at most LOCKSTEP_MAX_OBJECT_BYTES (1 GiB unless told, the same on all ranks). Gathering and scattering
/// take memory for the largest object times the group's size, so send large tensors as tensors.
///
/// `group`: empty means the default group. Ranks in arguments are global ranks. Synchronous. All members call
/// the same functions in the same order. `caller` is for the flight recorder: leave it out. Throws
/// - c10::ValueError for lists that stand on the wrong rank or have the wrong length, and on ranks that are
///   no member of the group: at once, before any rank is waited for;
/// - c10::ValueError for an object that can't be pickled, with the place within it. The other ranks then get
///   c10::DistBackendError that names this one, and the group remains usable;
/// - c10::DistBackendError that names the sender for bytes that are no object, and
/// - what the tensor collectives throw when a peer dies, is late or calls something else.
/// Thread-safe.
namespace lockstep {

/// object_list[r] receives rank r's `obj`. The list has one element for each rank.
void all_gather_object(std::vector<c10::IValue>& object_list, const c10::IValue& obj,
                       const ProcessGroup& group = {},
                       const std::source_location& caller = std::source_location::current());
/// The ranks' values, of a type that to_object() and from_object() know, as all_gather_object() gathers them.
template <class T>
std::vector<T> all_gather_values(const T& own, const ProcessGroup& group = {},
                                 const std::source_location& caller = std::source_location::current()) {
  std::vector<c10::IValue> objects(static_cast<size_t>(std::max(get_world_size(group), 0)));
  all_gather_object(objects, to_object(own), group, caller);
  std::vector<T> values;
  for (const c10::IValue& object : objects) values.push_back(from_object<T>(object));
  return values;
}

/// On `dst`, (*object_gather_list)[r] receives rank r's `obj`: one element for each rank; elsewhere it is
/// null.
void gather_object(const c10::IValue& obj, std::vector<c10::IValue>* object_gather_list = nullptr,
                   int dst = 0, const ProcessGroup& group = {},
                   const std::source_location& caller = std::source_location::current());

/// `src`'s objects replace all ranks'. All lists have the same length, at least 1.
void broadcast_object_list(std::vector<c10::IValue>& object_list, int src = 0, const ProcessGroup& group = {},
                           const std::source_location& caller = std::source_location::current());

/// The first element of scatter_object_output_list on rank r receives `src`'s scatter_object_input_list[r].
/// The output list has at least one element, the input list one for each rank on `src`, none elsewhere.
void scatter_object_list(std::vector<c10::IValue>& scatter_object_output_list,
                         const std::vector<c10::IValue>& scatter_object_input_list = {}, int src = 0,
                         const ProcessGroup& group = {},
                         const std::source_location& caller = std::source_location::current());

/// Sends objects, at least one, to `dst`, which must call recv_object_list() with a list of the same length.
void send_object_list(const std::vector<c10::IValue>& object_list, int dst, const ProcessGroup& group = {},
                      const std::source_location& caller = std::source_location::current());
/// Receives objects from `src`, or from the rank that sends first. Returns the sender's global rank.
int recv_object_list(std::vector<c10::IValue>& object_list, std::optional<int> src = {},
                     const ProcessGroup& group = {},
                     const std::source_location& caller = std::source_location::current());

}  // namespace lockstep

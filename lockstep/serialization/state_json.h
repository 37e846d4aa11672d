#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/tensor_part.h>

/// States as JSON, with their tensors elsewhere. What JSON has stands as itself: null, true and false, whole
/// numbers, finite floating point (always with a point or an exponent, and digits enough to be the same
/// again), UTF-8 strings, lists, and dicts with string keys of which none begins with "$". The rest is an
/// object with one key:
///
///     {"$float": "nan" | "inf" | "-inf" | "nan:HEX"}    HEX: the 64 bits of a NaN that is not the usual one
///     {"$bytes": "HEX"}                                a string that is not UTF-8
///     {"$tuple": [VALUE, …]}
///     {"$dict": [[KEY, VALUE], …]}                     a dict with other keys: numbers, bool, string
///     {"$complex": [REAL, IMAGINARY]}
///     {"$device": "cuda:0"}
///     {"$tensor": "NAME"}                              as called in the safetensors files; null: undefined
///
/// Spaces at the end make up for very many small dicts, which take much more memory than text: a text has 24
/// bytes for each "{" beyond the first 1,431,655 (whose dicts take up to 1 GiB), so that reading a text takes
/// at most that and memory in proportion to its length.
namespace lockstep::serialization {

/// How deep states may be nested.
constexpr int kMaxStateDepth = 200;

/// A tensor of a state: in which part ("model"), and the name that it gets within it.
struct StateTensor {
  std::string part;
  std::string name;
  at::Tensor tensor;
  std::optional<TensorPart> part_of = {};  ///< of a whole tensor, for those in objects of tensor_part_of()
};

struct EncodedState {
  std::string json;
  std::vector<StateTensor> tensors;
};

/// Tensors are named by the way to them, "state.fc1.weight.exp_avg", within the part that is the first key;
/// with `part`, all are in that part, and the first key is part of the name. What would have a name twice
/// gets "#2" at its end. Throws c10::ValueError with the place for what can't be encoded, dicts whose keys
/// collide (as NaNs do) among it. `owner` begins messages: "state".
EncodedState encode_state(const StateDict& state, const std::string& owner, const std::string& part = {});

/// The union of states that several ranks have encoded: of dicts, key by key; else the first one's. Throws
/// c10::ValueError when tensors at different places have the same name.
std::string merge_states(const std::vector<std::string>& json);

/// Finds a tensor: (part, name). May throw.
using TensorSource = std::function<at::Tensor(const std::string& part, const std::string& name)>;

/// Reads a state again. `part` as in encode_state(). Throws CheckpointError, beginning with `what`, for
/// anything that encode_state() would not have written. Memory stays below 1 GiB and 50 times the bytes, or
/// 200 times where keys were chosen to collide. Thread-safe.
StateDict decode_state(std::string_view json, const TensorSource& tensors, const std::string& what,
                       const std::string& part = {});

}  // namespace lockstep::serialization

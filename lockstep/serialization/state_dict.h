#pragma once

#include <map>
#include <string>

#include <ATen/core/ivalue.h>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/serialization/object_conversion.h>

namespace lockstep {

/// What a state_dict() returns and a load_state_dict() takes: Python's dict, with Python's keys where PyTorch
/// has the class. The values are what to_object() makes: numbers, strings, tensors, lists, and dicts (an
/// inner StateDict is to_object(inner), and from_object<StateDict>() again), so that torch::pickle_save()
/// writes what Python reads.
using StateDict = std::map<std::string, c10::IValue>;

/// The value of `key`, converted by from_object(). Throws c10::ValueError that names `owner` (the class that
/// loads) and the key when it is missing or of another kind. Thread-safe.
template <class T>
T state_value(const StateDict& state, const std::string& key, const std::string& owner) {
  const auto found = state.find(key);
  TORCH_CHECK_VALUE(found != state.end(), owner, "::load_state_dict: the state has no '", key,
                    "'; give it what state_dict() of the same class returned");
  try {
    return from_object<T>(found->second);
  } catch (...) {
    rethrow_with_context("in '" + key + "' of the state given to " + owner + "::load_state_dict");
  }
}

}  // namespace lockstep

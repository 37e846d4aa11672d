#pragma once

#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep::pickle {

/// What keeps values[0], values[2], … from being the keys of a c10::Dict; nullptr if nothing does.
///
/// c10::Dict doubles its table whenever a key lands log2(size) places or more past its own, and its hashes
/// are public: sixty chosen keys would make it grow until memory ends. So keys that collide more than chance
/// explains are refused. (c10/util/order_preserving_flat_hash_map.h, emplace_new_key)
const char* find_key_problem(const std::vector<c10::IValue>& keys_and_values);

/// Puts values[1], values[3], … into an empty dict, under the keys before them. Returns what is wrong with
/// the keys, nullptr if nothing is.
const char* fill_dict(c10::impl::GenericDict& dict, std::vector<c10::IValue> keys_and_values);

}  // namespace lockstep::pickle

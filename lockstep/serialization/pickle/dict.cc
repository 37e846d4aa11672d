#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include <ATen/core/Dict.h>

#include <lockstep/serialization/pickle/dict.h>

namespace lockstep::pickle {
namespace {

/// Whether a table of 2^bits places holds the keys without growing. `hashes`: multiplied already, and sorted,
/// so that keys stand in the order of their own places (Robin Hood hashing keeps them so).
bool fits(const std::vector<uint64_t>& hashes, int bits) {
  const auto most_steps = static_cast<uint64_t>(std::max(bits, 4));
  uint64_t next_free = 0;
  for (const uint64_t hash : hashes) {
    const uint64_t own = hash >> (64 - bits);
    const uint64_t place = std::max(own, next_free);
    if (place - own >= most_steps) return false;
    next_free = place + 1;
  }
  return true;
}

}  // namespace

const char* find_key_problem(const std::vector<c10::IValue>& keys_and_values) {
  std::vector<uint64_t> hashes;
  hashes.reserve(keys_and_values.size() / 2);
  for (size_t i = 0; i + 1 < keys_and_values.size(); i += 2) {
    const c10::IValue& key = keys_and_values[i];
    if (!(key.isString() || key.isInt() || key.isBool() || key.isDouble() || key.isComplexDouble())) {
      return "a dict with keys other than strings, numbers and bools";
    }
    constexpr uint64_t kFibonacci = 11400714819323198485ull;
    hashes.push_back(kFibonacci * c10::detail::DictKeyHash()(key));
  }
  std::sort(hashes.begin(), hashes.end());
  // At most half full. More places for chance, which is the greater the fewer the keys are: what is refused
  // then are keys that were chosen.
  const int smallest = std::bit_width(2 * hashes.size() + 1);
  const int doublings = hashes.size() < 8 ? 3 : hashes.size() < 256 ? 2 : 1;
  for (int bits = smallest; bits <= smallest + doublings; ++bits) {
    if (fits(hashes, bits)) return nullptr;
  }
  return "a dict whose keys collide, which would take unreasonable memory";
}

const char* fill_dict(c10::impl::GenericDict& dict, std::vector<c10::IValue> keys_and_values) {
  if (const char* problem = find_key_problem(keys_and_values)) return problem;
  for (size_t i = 0; i + 1 < keys_and_values.size(); i += 2) {
    if (!dict.insert(std::move(keys_and_values[i]), std::move(keys_and_values[i + 1])).second) {
      return "a dict with a key twice";
    }
  }
  return nullptr;
}

}  // namespace lockstep::pickle

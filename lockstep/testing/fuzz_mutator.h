#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace lockstep::testing {

/// Makes inputs for a fuzzer out of others: flips bits, writes extreme numbers (as bytes of either order and
/// as digits), cuts, inserts, erases, repeats and splices. The same seed and the same calls give the same
/// inputs on every machine. Not thread-safe.
class FuzzMutator {
 public:
  explicit FuzzMutator(uint64_t seed, size_t max_length) : random_(seed), max_length_(max_length) {}

  /// A number in [0, bound); 0 for a bound of 0.
  size_t below(size_t bound) { return bound == 0 ? 0 : static_cast<size_t>(random_() % bound); }

  /// `input` after one to sixteen changes, never longer than max_length. `other` is where splices come from.
  std::string mutate(std::string input, const std::string& other);

 private:
  void change_once(std::string& text, const std::string& other);
  void flip_bit(std::string& text);
  void set_byte(std::string& text);
  void set_word(std::string& text);
  void set_digits(std::string& text);
  void insert(std::string& text);
  void erase(std::string& text);
  void repeat(std::string& text);
  void splice(std::string& text, const std::string& other);
  size_t length_of_part(size_t most);

  std::mt19937_64 random_;
  size_t max_length_;
};

}  // namespace lockstep::testing

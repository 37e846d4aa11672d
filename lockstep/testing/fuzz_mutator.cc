#include <algorithm>
#include <array>
#include <cctype>

#include <lockstep/testing/fuzz_mutator.h>

namespace lockstep::testing {
namespace {

// What parsers get wrong: the ends of ranges, the number after each, and delimiters.
constexpr std::array<uint8_t, 24> kBytes = {0x00, 0x01, 0x7f, 0x80, 0xff, 0xfe, ' ',  '\n',
                                            '\t', ',',  ':',  '-',  '+',  '.',  '\\', '"',
                                            '\'', '[',  ']',  '{',  '}',  '0',  '9',  '/'};
constexpr std::array<uint64_t, 16> kWords = {0,
                                             1,
                                             0x7f,
                                             0xff,
                                             0x7fff,
                                             0xffff,
                                             0x10000,
                                             0x7fffffff,
                                             0x80000000,
                                             0xffffffff,
                                             0x100000000,
                                             0x3fffffffffffffff,
                                             0x7fffffffffffffff,
                                             0x8000000000000000,
                                             0xfffffffffffffffe,
                                             0xffffffffffffffff};
constexpr std::array<const char*, 16> kNumbers = {"0",
                                                  "1",
                                                  "-1",
                                                  "00",
                                                  "0x10",
                                                  "255",
                                                  "65535",
                                                  "65536",
                                                  "2147483647",
                                                  "2147483648",
                                                  "4294967296",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "99999999999999999999999",
                                                  "1e999"};

}  // namespace

std::string FuzzMutator::mutate(std::string input, const std::string& other) {
  const size_t changes = size_t{1} << below(5);
  for (size_t i = 0; i < changes; ++i) {
    change_once(input, other);
    if (input.size() > max_length_) input.resize(max_length_);
  }
  return input;
}

void FuzzMutator::change_once(std::string& text, const std::string& other) {
  if (text.empty()) return below(2) == 0 ? insert(text) : splice(text, other);
  switch (below(10)) {
    case 0:
    case 1:
      return flip_bit(text);
    case 2:
      return set_byte(text);
    case 3:
      return set_word(text);
    case 4:
      return set_digits(text);
    case 5:
      return insert(text);
    case 6:
      return erase(text);
    case 7:
      return repeat(text);
    case 8:
      return splice(text, other);
    default:
      return text.resize(below(text.size()));
  }
}

void FuzzMutator::flip_bit(std::string& text) {
  text[below(text.size())] ^= static_cast<char>(1 << below(8));
}

void FuzzMutator::set_byte(std::string& text) {
  text[below(text.size())] = static_cast<char>(below(2) == 0 ? kBytes[below(kBytes.size())] : below(256));
}

/// An extreme number of 2, 4 or 8 bytes, little- or big-endian.
void FuzzMutator::set_word(std::string& text) {
  const size_t width = std::min(size_t{2} << below(3), text.size());
  const size_t begin = below(text.size() - width + 1);
  const uint64_t word = kWords[below(kWords.size())];
  const bool big = below(2) == 0;
  for (size_t i = 0; i < width; ++i) {
    text[begin + i] = static_cast<char>(word >> 8 * (big ? width - 1 - i : i));
  }
}

/// An extreme number in place of one that is written out.
void FuzzMutator::set_digits(std::string& text) {
  const auto is_digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  auto begin = std::find_if(text.begin() + static_cast<ptrdiff_t>(below(text.size())), text.end(), is_digit);
  if (begin == text.end()) return set_byte(text);
  while (begin != text.begin() && is_digit(*(begin - 1))) --begin;
  const auto end = std::find_if_not(begin, text.end(), is_digit);
  text.replace(begin, end, kNumbers[below(kNumbers.size())]);
}

void FuzzMutator::insert(std::string& text) {
  const size_t begin = below(text.size() + 1);
  std::string part(1 + below(8), '\0');
  for (char& c : part) {
    c = static_cast<char>(below(2) == 0 ? kBytes[below(kBytes.size())] : below(256));
  }
  text.insert(begin, part);
}

void FuzzMutator::erase(std::string& text) {
  const size_t begin = below(text.size());
  text.erase(begin, length_of_part(text.size() - begin));
}

/// Makes one part stand there twice, or very often: nesting, long lists, keys that are given again.
void FuzzMutator::repeat(std::string& text) {
  const size_t begin = below(text.size());
  const std::string part = text.substr(begin, length_of_part(text.size() - begin));
  const size_t room = text.size() < max_length_ ? max_length_ - text.size() : 0;
  const size_t times = below(4) != 0 ? 1 : 1 + below(room / part.size() + 1);
  std::string more;
  for (size_t i = 0; i < times; ++i) more += part;
  text.insert(begin, more);
}

/// A part of another input, put between or over the bytes of this one.
void FuzzMutator::splice(std::string& text, const std::string& other) {
  if (other.empty()) return insert(text);
  const size_t from = below(other.size());
  const std::string part = other.substr(from, length_of_part(other.size() - from));
  const size_t begin = below(text.size() + 1);
  text.replace(begin, below(2) == 0 ? 0 : part.size(), part);
}

/// Mostly short parts, for long ones are rarely understood; 1 to `most`.
size_t FuzzMutator::length_of_part(size_t most) {
  return 1 + below(below(4) == 0 ? most : std::min<size_t>(most, 16));
}

}  // namespace lockstep::testing

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>

namespace lockstep::data::internal {

/// The code point at `position`, which moves past it. Throws c10::ValueError with the position for what
/// Unicode calls ill-formed: stray and missing continuation bytes, overlong forms, surrogates, and what lies
/// beyond U+10FFFF (The Unicode Standard, table 3-7).
inline char32_t next_code_point(std::string_view text, int64_t& position) {
  const auto at = static_cast<size_t>(position);
  const auto byte = [&](size_t offset) { return static_cast<unsigned char>(text[at + offset]); };
  const unsigned char first = byte(0);
  if (first < 0x80) {
    ++position;
    return first;
  }
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  bool good = first >= 0xc2 && first <= 0xf4 && text.size() - at >= length;
  char32_t code_point = first & (0x7fU >> length);
  for (size_t offset = 1; good && offset < length; ++offset) {
    good = (byte(offset) & 0xc0) == 0x80;
    code_point = code_point << 6 | (byte(offset) & 0x3fU);
  }
  constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  good = good && code_point >= kSmallest[length] && code_point <= 0x10ffff &&
         (code_point < 0xd800 || code_point > 0xdfff);
  TORCH_CHECK_VALUE(good, "byte ", position, " begins no UTF-8 character");
  position += static_cast<int64_t>(length);
  return code_point;
}

/// Appends a code point that next_code_point() has returned.
inline void append_utf8(char32_t code_point, std::string& text) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
    return;
  }
  const auto continuation = [&](int shift) { put(0x80 | (code_point >> shift & 0x3f)); };
  if (code_point < 0x800) {
    put(0xc0 | code_point >> 6);
  } else if (code_point < 0x10000) {
    put(0xe0 | code_point >> 12);
    continuation(6);
  } else {
    put(0xf0 | code_point >> 18);
    continuation(12);
    continuation(6);
  }
  continuation(0);
}

}  // namespace lockstep::data::internal

#include <charconv>
#include <system_error>

#include <lockstep/base/text/hex.h>

namespace lockstep {

std::string to_hex(std::span<const uint8_t> bytes) {
  static constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string to_hex(std::string_view bytes) {
  return to_hex({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

std::optional<std::string> from_hex(std::string_view text) {
  if (text.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    uint8_t byte = 0;
    const char* const end = text.data() + i + 2;
    const auto [stop, error] = std::from_chars(text.data() + i, end, byte, 16);
    if (error != std::errc() || stop != end) return std::nullopt;
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

}  // namespace lockstep

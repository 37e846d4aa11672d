#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {

/// Messages in a stream of bytes: each with its length in front, four bytes, little-endian, from 1 to
/// kMostMessageBytes; where reports come, too, to kMostReportBytes.
inline std::string framed(std::string_view message) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(message.size() >> (8 * i) & 0xff);
  return bytes.append(message);
}

/// Takes the stream apart again. Holds no more than one message and what came after it in one append().
class FrameReader {
 public:
  explicit FrameReader(size_t most = kMostMessageBytes) : most_(most) {}
  /// From now on.
  void set_most(size_t most) { most_ = most; }
  void append(std::string_view bytes) { bytes_.append(bytes); }
  /// The next message that is complete; nothing when there is none, or the stream is broken().
  std::optional<std::string> next() {
    if (broken_ || bytes_.size() < 4) return std::nullopt;
    size_t size = 0;
    for (size_t i = 0; i < 4; ++i) size |= static_cast<size_t>(static_cast<uint8_t>(bytes_[i])) << (8 * i);
    if (size == 0 || size > most_) broken_ = true;
    if (broken_ || bytes_.size() < 4 + size) return std::nullopt;
    std::string message = bytes_.substr(4, size);
    bytes_.erase(0, 4 + size);
    return message;
  }
  /// What has come after the last message, where bytes of another kind follow.
  std::string take_rest() { return std::exchange(bytes_, {}); }
  /// A length was out of range; nothing that follows can be read.
  bool broken() const { return broken_; }

 private:
  size_t most_;
  std::string bytes_;
  bool broken_ = false;
};

}  // namespace lockstep::launch

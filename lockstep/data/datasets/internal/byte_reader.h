#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/base/unique_fd.h>

struct z_stream_s;

namespace lockstep::data::internal {

/// Reads a file from its start to its end, and decompresses it when it begins as gzip does. Errors are
/// c10::Error that name the file. Not thread-safe.
class ByteReader {
 public:
  /// Throws when the file can't be opened or is not a regular file.
  explicit ByteReader(std::string path);
  ~ByteReader();
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  /// Puts the next `count` bytes at `destination`; returns how many there were, fewer only at the end. Throws
  /// on a read error and on a damaged gzip stream.
  int64_t read(void* destination, int64_t count);

  const std::string& path() const { return path_; }
  bool compressed() const { return inflater_ != nullptr; }
  /// The most bytes that read() can deliver in all: the file's size, or what deflate can make of it.
  int64_t capacity() const;

 private:
  bool fill();  // refills the exhausted input_; false at the end of the file
  int64_t read_plain(uint8_t* destination, int64_t count);
  int64_t read_gzip(uint8_t* destination, int64_t count);

  std::string path_;
  UniqueFd file_;
  int64_t file_size_ = 0;
  std::vector<uint8_t> buffer_;
  const uint8_t* input_ = nullptr;
  int64_t available_ = 0;
  std::unique_ptr<z_stream_s> inflater_;  // none: the file is plain
  bool ended_ = false;                    // the last gzip member is complete
};

}  // namespace lockstep::data::internal

#pragma once

#include <cstdint>
#include <string>
#include <vector>
#include <zlib.h>

#include <c10/util/Exception.h>

/// For the tests of this room: files to read. Not installed as an interface.
namespace lockstep::data {

inline std::string idx_header(uint8_t type, const std::vector<uint32_t>& sizes) {
  std::string header = {'\0', '\0', static_cast<char>(type), static_cast<char>(sizes.size())};
  for (const uint32_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) header += static_cast<char>(size >> shift & 0xff);
  }
  return header;
}

inline std::string gzip(const std::string& bytes) {
  z_stream stream{};
  TORCH_CHECK(::deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK,
              "deflateInit2");
  std::string result(::deflateBound(&stream, bytes.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(result.data());
  stream.avail_out = static_cast<uInt>(result.size());
  const int code = ::deflate(&stream, Z_FINISH);
  result.resize(stream.total_out);
  ::deflateEnd(&stream);
  TORCH_CHECK(code == Z_STREAM_END, "deflate");
  return result;
}

}  // namespace lockstep::data

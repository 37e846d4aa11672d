#include <c10/util/Exception.h>

#include <lockstep/data/datasets/internal/csv_reader.h>

namespace lockstep::data::internal {
namespace {

constexpr size_t kBlockSize = 256 * 1024;
constexpr size_t kMostRowBytes = 16 * 1024 * 1024;
// Each takes some 100 bytes of memory, and as little as a thousandth of a byte of a gzip file.
constexpr size_t kMostFields = 8 * 1024 * 1024;

}  // namespace

CsvReader::CsvReader(const std::string& path, char delimiter, char quote)
    : file_(path), delimiter_(delimiter), quote_(quote), buffer_(kBlockSize) {
  const auto special = [](char c) { return c == '\n' || c == '\r'; };
  TORCH_CHECK_VALUE(!special(delimiter) && !special(quote) && delimiter != quote,
                    "CSV: delimiter and quote should be two different characters, and no line ends");
  if (peek() == 0xef && available_ >= 3 && buffer_[1] == 0xbb && buffer_[2] == 0xbf) position_ = 3;
}

int CsvReader::peek() {
  if (position_ == available_) {
    available_ = static_cast<size_t>(file_.read(buffer_.data(), static_cast<int64_t>(buffer_.size())));
    position_ = 0;
    if (available_ == 0) return kEnd;
  }
  return buffer_[position_];
}

/// Passes over LF, CR or CRLF.
void CsvReader::end_line() {
  const int first = peek();
  take();
  if (first == '\r' && peek() == '\n') take();
  ++line_;
}

void CsvReader::append(std::string_view bytes) {
  TORCH_CHECK(bytes.size() <= kMostRowBytes - text_.size(), path(), ", line ", row_line_,
              ": the row has more than 16 MiB; a quote that is not closed would explain that");
  text_ += bytes;
}

void CsvReader::end_field() {
  TORCH_CHECK(ends_.size() < kMostFields, path(), ", line ", row_line_, ": the row has more than ",
              kMostFields, " fields");
  ends_.push_back(text_.size());
}

/// Reads up to the delimiter, the line's end or the file's, which stays.
void CsvReader::read_field() {
  const auto ends_field = [delimiter = static_cast<unsigned char>(delimiter_)](int byte) {
    return byte == kEnd || byte == '\n' || byte == '\r' || byte == delimiter;
  };
  const int quote = static_cast<unsigned char>(quote_);
  if (peek() != quote) {
    while (!ends_field(peek())) {
      const size_t begin = position_;
      while (position_ < available_ && !ends_field(buffer_[position_])) ++position_;
      append({reinterpret_cast<const char*>(buffer_.data()) + begin, position_ - begin});
    }
    return;
  }
  const int64_t opened = line_;
  take();
  for (;;) {
    const int byte = peek();
    TORCH_CHECK(byte != kEnd, path(), ", line ", opened, ": a quote is opened and never closed");
    take();
    if (byte == quote) {
      if (peek() != quote) break;
      take();  // a doubled quote is one
    } else if (byte == '\n' || (byte == '\r' && peek() != '\n')) {
      ++line_;
    }
    const auto character = static_cast<char>(byte);
    append({&character, 1});
  }
  TORCH_CHECK(ends_field(peek()), path(), ", line ", line_, ": '", static_cast<char>(peek()),
              "' follows a closing quote, where the delimiter '", delimiter_,
              "' or the line's end should; a quote within quotes is written twice");
}

bool CsvReader::next() {
  while (peek() == '\n' || peek() == '\r') end_line();
  if (peek() == kEnd) return false;
  row_line_ = line_;
  text_.clear();
  ends_.clear();
  read_field();
  end_field();
  while (peek() == static_cast<unsigned char>(delimiter_)) {
    take();
    read_field();
    end_field();
  }
  if (peek() != kEnd) end_line();
  fields_.clear();
  size_t begin = 0;
  for (const size_t end : ends_) {
    fields_.push_back(std::string_view(text_).substr(begin, end - begin));
    begin = end;
  }
  return true;
}

}  // namespace lockstep::data::internal

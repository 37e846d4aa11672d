#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/data/datasets/internal/byte_reader.h>

namespace lockstep::data::internal {

/// Splits a CSV file, plain or gzip, into rows of fields, by RFC 4180: a field in quotes may hold delimiters,
/// line ends and doubled quotes. As Python's csv module does, it takes LF, CR or CRLF for a line's end,
/// passes over empty lines, and takes a quote within a field that doesn't begin with one literally. A byte
/// order mark at the beginning is left out.
///
/// Errors are c10::Errors that name the file and the line: a quote that is not closed, something else than a
/// delimiter after a closing one, a row of more than 16 MiB or 8,388,608 fields. Not thread-safe.
class CsvReader {
 public:
  CsvReader(const std::string& path, char delimiter, char quote);

  /// Reads the next row into fields(); false at the end of the file.
  bool next();
  /// The row's fields; the next next() overwrites them.
  const std::vector<std::string_view>& fields() const { return fields_; }
  /// Where the row begins, counted from 1.
  int64_t line() const { return row_line_; }
  const std::string& path() const { return file_.path(); }

 private:
  static constexpr int kEnd = -1;

  int peek();  // the next byte, or kEnd
  void take() { ++position_; }
  void end_line();
  void read_field();
  void append(std::string_view bytes);
  void end_field();

  ByteReader file_;
  const char delimiter_;
  const char quote_;
  std::vector<uint8_t> buffer_;
  size_t position_ = 0;
  size_t available_ = 0;
  int64_t line_ = 1;
  int64_t row_line_ = 1;
  std::string text_;          // the row's fields, one after the other
  std::vector<size_t> ends_;  // where each ends in text_
  std::vector<std::string_view> fields_;
};

}  // namespace lockstep::data::internal

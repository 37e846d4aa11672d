#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launch {

/// Merges the output of several sources into one stream of whole lines, each with its source's prefix. Pure:
/// bytes in, bytes out; the caller reads, writes and keeps the time.
///
/// - A line is emitted when its newline has come; two sources never share a row.
/// - An unfinished line is held back until flush() (the source has been idle) or finish() (its stream has
///   ended). A flushed row stays open for its source's next bytes, until another source writes.
/// - A carriage return means that the row is drawn again, as progress bars do. On a terminal each state is
///   shown in place, clipped to the terminal's width; a line of another source is put above the bar, which is
///   drawn again. Elsewhere only the row's last state is emitted, when its newline comes or its stream ends.
/// Not thread-safe.
class LineForwarder {
 public:
  static constexpr size_t kLongestLine = 64 * 1024;  // what is held back of one line at most, in bytes

  /// `prefixes[i]` is put before the lines of source i; `columns` is the terminal's width, 0 when it is none.
  explicit LineForwarder(std::vector<std::string> prefixes, size_t columns = 0);

  /// Takes bytes from a source; returns what is to be written.
  std::string feed(size_t source, std::string_view bytes);
  /// The source has been idle: its unfinished text.
  std::string flush(size_t source);
  /// The source's stream has ended: its unfinished text as a last line.
  std::string finish(size_t source);
  /// Whether flush() would return anything.
  bool holds_back(size_t source) const;
  void set_columns(size_t columns) { columns_ = columns; }

 private:
  struct Source {
    std::string prefix;
    std::string text;  // of the current line: not yet written, or (in place) as last drawn
    bool returned =
        false;  // a carriage return came last: the next byte begins the row anew, unless a newline
    bool in_place = false;      // this line has had a carriage return
    bool row_restarts = false;  // it had one after a part was written to something that is no terminal
  };
  static constexpr size_t kNoSource = static_cast<size_t>(-1);

  void end_line(size_t source, std::string& out);
  void write_part(size_t source, std::string& out);
  void draw_in_place(size_t source, std::string& out);
  void take_row(size_t source, std::string& out);
  std::string drawn(const Source& source) const;

  std::vector<Source> sources_;
  size_t columns_;
  size_t row_owner_ = kNoSource;  // whose unfinished line stands in the last row written
};

/// The last lines of a stream, for the report of a failure. Long lines are cut, and those of C++ stacks left out, which would
/// leave no room for the message that they follow: an uncaught c10::Error's, or a warning of PyTorch's store.
class LineTail {
 public:
  static constexpr size_t kLines = 20;
  static constexpr size_t kLineBytes = 1000;

  void feed(std::string_view bytes);
  /// Oldest first, an unfinished one included.
  std::vector<std::string> lines() const;

 private:
  std::deque<std::string> complete_;
  std::string current_;
  bool returned_ = false;
};

}  // namespace lockstep::launch

#include <algorithm>
#include <utility>

#include <lockstep/base/text/rank_mark.h>
#include <lockstep/base/text/stack_lines.h>
#include <lockstep/launch/agent/line_forwarder.h>

namespace lockstep::launch {
namespace {

constexpr std::string_view kClearRow = "\r\x1b[K";

// The first `columns` columns of a text: code points are counted, escape sequences kept and not counted.
std::string clip(const std::string& text, size_t columns) {
  std::string result;
  size_t used = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b' && i + 1 < text.size() && text[i + 1] == '[') {
      size_t end = i + 2;
      while (end < text.size() && (text[end] < '@' || text[end] > '~')) ++end;
      result.append(text, i, end + 1 - i);
      i = end;
      continue;
    }
    const bool continues = (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80;  // of a UTF-8 sequence
    if (!continues) ++used;
    if (used <= columns) result += text[i];
  }
  return result;
}

}  // namespace

LineForwarder::LineForwarder(std::vector<std::string> prefixes, size_t columns) : columns_(columns) {
  for (std::string& prefix : prefixes) {
    sources_.emplace_back();
    sources_.back().prefix = std::move(prefix);
  }
}

std::string LineForwarder::feed(size_t index, std::string_view bytes) {
  Source& source = sources_.at(index);
  std::string out;
  bool redraw = false;
  while (!bytes.empty()) {
    if (bytes.front() == '\n') {
      end_line(index, out);
      bytes.remove_prefix(1);
      redraw = false;
      continue;
    }
    if (bytes.front() == '\r') {
      source.returned = true;
      bytes.remove_prefix(1);
      continue;
    }
    if (source.returned) {
      // Now it is certain that the carriage return was not half of a "\r\n".
      source.returned = false;
      source.in_place = true;
      source.row_restarts = columns_ == 0 && row_owner_ == index;
      source.text.clear();
    }
    const std::string_view run = bytes.substr(0, bytes.find_first_of("\r\n"));
    source.text += run;
    bytes.remove_prefix(run.size());
    redraw = source.in_place;
    if (source.text.size() > kLongestLine) {
      if (source.in_place) {
        source.text.resize(kLongestLine);
      } else {
        write_part(index, out);
      }
    }
  }
  // A bar that ends its updates with the carriage return is drawn as soon as that has come.
  if (columns_ > 0 && (redraw || (source.returned && !source.text.empty()))) draw_in_place(index, out);
  return out;
}

std::string LineForwarder::flush(size_t index) {
  std::string out;
  if (holds_back(index)) write_part(index, out);
  return out;
}

std::string LineForwarder::finish(size_t index) {
  std::string out;
  Source& source = sources_.at(index);
  if (!source.text.empty() || row_owner_ == index) end_line(index, out);
  return out;
}

bool LineForwarder::holds_back(size_t index) const {
  const Source& source = sources_.at(index);
  return !source.text.empty() && !source.in_place && !source.returned;
}

std::string LineForwarder::drawn(const Source& source) const {
  return clip(source.prefix + source.text, columns_);
}

// A complete line. The full text is written, not clipped: what stays on the screen or in a file is whole.
void LineForwarder::end_line(size_t index, std::string& out) {
  Source& source = sources_[index];
  const size_t other = row_owner_;
  if (other == index) {
    if (columns_ > 0 && source.in_place) {
      out.append(kClearRow).append(source.prefix).append(source.text);
    } else {
      if (source.row_restarts) out.append("\n").append(source.prefix);
      out += source.text;
    }
    row_owner_ = kNoSource;
  } else {
    take_row(index, out);
    out.append(source.prefix).append(source.text);
    row_owner_ = kNoSource;
  }
  out += '\n';
  source.text.clear();
  source.returned = source.in_place = source.row_restarts = false;
  // A bar that had to make room comes back below the line.
  if (other != kNoSource && other != index && columns_ > 0 && sources_[other].in_place) {
    out += drawn(sources_[other]);
    row_owner_ = other;
  }
}

// An unfinished line that is no bar: written as far as it goes; the row stays open for the rest.
void LineForwarder::write_part(size_t index, std::string& out) {
  Source& source = sources_[index];
  if (row_owner_ != index) {
    take_row(index, out);
    out += source.prefix;
  }
  out += source.text;
  source.text.clear();
  row_owner_ = index;
}

void LineForwarder::draw_in_place(size_t index, std::string& out) {
  Source& source = sources_[index];
  source.in_place = true;
  if (row_owner_ != index) take_row(index, out);
  out.append(kClearRow).append(drawn(source));
  row_owner_ = index;
}

// Makes the last row empty for another source: a bar is wiped, an unfinished line is ended.
void LineForwarder::take_row(size_t index, std::string& out) {
  if (row_owner_ == kNoSource || row_owner_ == index) return;
  const bool bar = columns_ > 0 && sources_[row_owner_].in_place;
  out += bar ? kClearRow : std::string_view("\n");
  row_owner_ = kNoSource;
}

void LineTail::feed(std::string_view bytes) {
  for (char byte : bytes) {
    if (byte == '\n') {
      std::string_view line = current_;
      take_rank_mark(line);  // an agent's
      if (!is_stack_line(line)) complete_.push_back(std::move(current_));
      current_.clear();
      returned_ = false;
      if (complete_.size() > kLines) complete_.pop_front();
    } else if (byte == '\r') {
      returned_ = true;
    } else {
      if (std::exchange(returned_, false)) current_.clear();
      if (current_.size() < kLineBytes) current_ += byte;
    }
  }
}

std::vector<std::string> LineTail::lines() const {
  std::vector<std::string> result(complete_.begin(), complete_.end());
  if (!current_.empty()) result.push_back(current_);
  if (result.size() > kLines) result.erase(result.begin());
  return result;
}

}  // namespace lockstep::launch

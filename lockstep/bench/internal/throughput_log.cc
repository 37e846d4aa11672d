#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <system_error>

#include <lockstep/base/text/rank_mark.h>
#include <lockstep/bench/internal/throughput_log.h>

namespace lockstep::bench::internal {
namespace {

constexpr std::string_view kMark = "LOCKSTEP_SCALING ";
constexpr std::string_view kOfTrainer = "samples/s=";
constexpr const char* kUsualUnit = "samples/s";
// A line that is longer is none that we look for.
constexpr size_t kLongestThroughputLine = size_t{64} << 10;

/// A number above 0 at the begin of the text, which is left with what follows.
std::optional<double> take_number(std::string_view& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value) || value <= 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

}  // namespace

void ThroughputLog::feed(int rank, int stream, std::string_view bytes) {
  std::string& line = unfinished_[{rank, stream}];
  while (true) {
    const size_t end = bytes.find_first_of("\r\n");  // a progress bar draws its line again
    if (line.size() < kLongestThroughputLine) line += bytes.substr(0, end);
    if (end == std::string_view::npos) return;
    take_line(rank, line);
    line.clear();
    bytes.remove_prefix(end + 1);
  }
}

void ThroughputLog::finish() {
  for (auto& [source, line] : unfinished_) take_line(source.first, line);
  unfinished_.clear();
}

std::optional<Throughput> ThroughputLog::marked() const {
  if (marked_.empty()) return std::nullopt;
  return marked_.begin()->second;
}

std::optional<Throughput> ThroughputLog::trainer() const {
  return trainer_;
}

void ThroughputLog::take_line(int rank, std::string_view line) {
  rank = take_rank_mark(line).value_or(rank);
  if (line.starts_with(kMark)) {
    std::string_view rest = line.substr(kMark.size());
    if (const auto value = take_number(rest); value && (rest.empty() || rest.front() == ' ')) {
      rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
      marked_[rank] = {*value, rest.empty() ? kUsualUnit : std::string(rest)};
    }
    return;
  }
  const size_t place = line.rfind(kOfTrainer);
  if (rank != 0 || place == std::string_view::npos) return;
  std::string_view rest = line.substr(place + kOfTrainer.size());
  if (const auto value = take_number(rest)) trainer_ = Throughput{*value, kUsualUnit};
}

}  // namespace lockstep::bench::internal

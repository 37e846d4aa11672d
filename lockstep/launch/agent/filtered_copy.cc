#include <algorithm>
#include <utility>

#include <lockstep/launch/agent/filtered_copy.h>

namespace lockstep::launch {

FilteredCopy::FilteredCopy(const std::string& file, std::vector<std::string> texts, const std::string& role,
                           int nprocs)
    : file_("lockstep run", file, AppendFile::Kind::kBinary),
      texts_(std::move(texts)),
      role_(role),
      ranks_(static_cast<size_t>(nprocs), LineForwarder({""})) {
  file_.open();
}

void FilteredCopy::feed(int local_rank, std::string_view bytes) {
  write(local_rank, ranks_.at(static_cast<size_t>(local_rank)).feed(0, bytes));
}

void FilteredCopy::finish(int local_rank) {
  write(local_rank, ranks_.at(static_cast<size_t>(local_rank)).finish(0));
}

void FilteredCopy::write(int local_rank, std::string_view lines) {
  std::string chosen;
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, std::min(lines.find('\n'), lines.size() - 1) + 1);
    lines.remove_prefix(line.size());
    const bool wanted = std::any_of(texts_.begin(), texts_.end(), [line](const std::string& text) {
      return line.find(text) != std::string_view::npos;
    });
    if (wanted) chosen.append("[").append(role_).append(std::to_string(local_rank)).append("]:").append(line);
  }
  if (!chosen.empty()) file_.append(chosen);
}

}  // namespace lockstep::launch

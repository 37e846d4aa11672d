#include <algorithm>
#include <utility>

#include <lockstep/launch/agent/filtered_copy.h>

namespace lockstep::launch {

FilteredCopy::FilteredCopy(const std::string& file, std::vector<std::string> texts, const std::string& role,
                           int nprocs)
    : file_("lockstep run", file, AppendFile::Kind::kBinary),
      texts_(std::move(texts)),
      role_(role),
      lines_(static_cast<size_t>(nprocs)) {
  file_.open();
}

void FilteredCopy::feed(int local_rank, std::string_view bytes) {
  Line& line = lines_.at(static_cast<size_t>(local_rank));
  std::string chosen;
  while (!bytes.empty()) {
    const std::string_view part = bytes.substr(0, bytes.find_first_of("\r\n"));
    line.text += part.substr(0, kLongestLine - line.text.size());
    bytes.remove_prefix(part.size());
    if (!part.empty()) line.returned = false;
    if (bytes.empty()) break;
    const bool second_half = bytes.front() == '\n' && line.returned;
    if (!second_half) end_line(local_rank, chosen);
    line.returned = bytes.front() == '\r';
    bytes.remove_prefix(1);
  }
  if (!chosen.empty()) file_.append(chosen);
}

void FilteredCopy::finish(int local_rank) {
  std::string chosen;
  if (!lines_.at(static_cast<size_t>(local_rank)).text.empty()) end_line(local_rank, chosen);
  if (!chosen.empty()) file_.append(chosen);
}

void FilteredCopy::end_line(int local_rank, std::string& chosen) {
  std::string& line = lines_[static_cast<size_t>(local_rank)].text;
  const bool wanted = std::any_of(texts_.begin(), texts_.end(), [&line](const std::string& text) {
    return line.find(text) != std::string::npos;
  });
  if (wanted) {
    chosen.append("[")
        .append(role_)
        .append(std::to_string(local_rank))
        .append("]:")
        .append(line)
        .append("\n");
  }
  line.clear();
}

}  // namespace lockstep::launch

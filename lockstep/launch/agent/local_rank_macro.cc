#include <cctype>
#include <string_view>

#include <lockstep/launch/agent/local_rank_macro.h>

namespace lockstep::launch {

std::string with_local_rank(const std::string& word, int local_rank) {
  const auto is_of_name = [](char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_';
  };
  std::string result;
  bool found = false;
  for (std::string_view rest = word; !rest.empty();) {
    const bool in_braces = rest.starts_with("${local_rank}");
    const size_t length = in_braces ? 13 : rest.starts_with("$local_rank") ? 11 : 0;
    if (in_braces || (length != 0 && (rest.size() == length || !is_of_name(rest[length])))) {
      found = true;
      result += std::to_string(local_rank);
      rest.remove_prefix(length);
    } else {
      result += rest.front();
      rest.remove_prefix(rest.starts_with("$$") ? 2 : 1);
    }
  }
  return found ? result : word;
}

}  // namespace lockstep::launch

#include <array>
#include <fcntl.h>
#include <unistd.h>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep {

std::optional<std::string> read_kernel_file(const std::string& path) {
  // Not by a stream: files of the kernel may fail while they are read, and a file buffer throws then.
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  std::array<char, 4096> buffer;
  ssize_t got = 0;
  while (file && (got = ::read(file.get(), buffer.data(), buffer.size())) > 0) {
    text.append(buffer.data(), static_cast<size_t>(got));
  }
  if (!file || got < 0) return std::nullopt;
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

std::optional<int64_t> read_kernel_integer(const std::string& path) {
  const auto text = read_kernel_file(path);
  return text ? parse_number<int64_t>(*text) : std::nullopt;
}

}  // namespace lockstep

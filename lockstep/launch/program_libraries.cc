#include <algorithm>
#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <string_view>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <climits>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/program_libraries.h>
#include <lockstep/launch/worker_process.h>

namespace lockstep::launch {
namespace {

/// The loader that the kernel starts the executable with; empty where it needs none, is no 64-bit ELF file, or has privileges, with
/// which a loader reads other variables.
std::string loader_of(const std::string& program) {
  const UniqueFd file(::open(program.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0 || (status.st_mode & (S_ISUID | S_ISGID)) != 0 ||
      ::fgetxattr(file.get(), "security.capability", nullptr, 0) > 0) {
    return {};
  }
  Elf64_Ehdr header = {};
  const auto read_at = [&](void* to, size_t size, size_t offset) {
    return ::pread(file.get(), to, size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size);
  };
  if (!read_at(&header, sizeof(header), 0) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64) {
    return {};
  }
  for (size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr part = {};
    if (!read_at(&part, sizeof(part), header.e_phoff + i * header.e_phentsize)) return {};
    if (part.p_type != PT_INTERP) continue;
    std::string path(std::min<size_t>(part.p_filesz, PATH_MAX), '\0');
    return read_at(path.data(), path.size(), part.p_offset) ? path.c_str() : std::string();
  }
  return {};
}

}  // namespace

bool links_this_library(const std::string& program, const std::vector<std::string>& environment) {
  const std::string loader = loader_of(program);
  // Another one might run the program.
  if (!std::filesystem::path(loader).filename().string().starts_with("ld-linux")) return false;
  struct stat own = {};
  Dl_info library = {};
  if (::dladdr(reinterpret_cast<const void*>(&links_this_library), &library) == 0 ||
      ::stat(library.dli_fname, &own) != 0) {
    return false;
  }
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  std::optional<WorkerProcess> process;
  try {
    process.emplace(WorkerProcess::start({.program = loader,
                                          .arguments = {loader, "--list", program},
                                          .environment = environment,
                                          .standard = {nothing.get(), out.get(), nothing.get()}},
                                         nullptr));
  } catch (const c10::DistBackendError&) {  // the program itself may be started, by binfmt_misc for example
    return false;
  }
  out.reset();
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(in.get(), buffer, sizeof(buffer))) > 0 || (got < 0 && errno == EINTR);)
    if (got > 0) text.append(buffer, static_cast<size_t>(got));
  process.reset();
  // Lines such as "\tliblockstep.so => /usr/lib/liblockstep.so (0x00007f91e0200000)".
  constexpr std::string_view kArrow = " => ";
  for (size_t begin = 0; (begin = text.find(kArrow, begin)) != std::string::npos;) {
    begin += kArrow.size();
    const size_t end = std::min(text.find(" (0x", begin), text.size());
    struct stat listed = {};
    if (::stat(text.substr(begin, end - begin).c_str(), &listed) == 0 && listed.st_dev == own.st_dev &&
        listed.st_ino == own.st_ino) {
      return true;
    }
    begin = end;
  }
  return false;
}

}  // namespace lockstep::launch

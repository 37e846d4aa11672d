#include <cerrno>
#include <cstring>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/profiler/internal/trace_output.h>

namespace lockstep::profiler::internal {

TraceOutput::TraceOutput(std::string to)
    : to_(std::move(to)), replacement_(to_ + "." + std::to_string(::getpid()) + ".part") {
  file_.reset(::gzopen(replacement_.name().c_str(), to_.ends_with(".gz") ? "wb1" : "wbT"));
  if (file_ == nullptr) refuse();
}

void TraceOutput::write(const char* data, size_t size) {
  constexpr size_t kMost = size_t{1} << 30;  // zlib's sizes have 32 bits
  while (size > 0) {
    const size_t part = size < kMost ? size : kMost;
    if (::gzwrite(file_.get(), data, static_cast<unsigned>(part)) != static_cast<int>(part)) refuse();
    data += part;
    size -= part;
  }
}

void TraceOutput::commit() {
  if (::gzclose(file_.release()) != Z_OK || !replacement_.commit(to_)) refuse();
}

void TraceOutput::refuse() const {
  TORCH_CHECK(false, to_, " can't be written: ", std::strerror(errno));
}

}  // namespace lockstep::profiler::internal

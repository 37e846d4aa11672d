#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <zlib.h>

#include <lockstep/base/files/file_replacement.h>

namespace lockstep::profiler::internal {

/// A trace that is written: it takes the place of `to` as a whole, compressed if that ends with .gz. Throws c10::Error that
/// names it. Used by one thread.
class TraceOutput {
 public:
  explicit TraceOutput(std::string to);

  void write(const char* data, size_t size);
  void write(const std::string& text) { write(text.data(), text.size()); }
  void commit();

 private:
  [[noreturn]] void refuse() const;

  struct Close {
    void operator()(gzFile file) const { ::gzclose(file); }
  };
  const std::string to_;
  FileReplacement replacement_;
  std::unique_ptr<gzFile_s, Close> file_;
};

}  // namespace lockstep::profiler::internal

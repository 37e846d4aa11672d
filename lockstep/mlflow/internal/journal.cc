#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/mlflow/internal/journal.h>

namespace lockstep::mlflow::internal {
namespace {

using nlohmann::json;

constexpr size_t kRunIdWidth = 64;  // MLflow's are 32 characters
constexpr int64_t kLarge = int64_t{4} << 20;

/// Run ids come from a server and become names of files.
bool is_run_id(const std::string& text) {
  return !text.empty() && text.size() <= kRunIdWidth && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
  });
}

std::string without_trailing_blanks(std::string text) {
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace

std::string Journal::mark() const {
  return formatted(R"({"sent":%20lld,"create_tried":%d,"run_id":"%-*s"})"
                   "\n",
                   static_cast<long long>(sent_), create_tried_ ? 1 : 0, static_cast<int>(kRunIdWidth),
                   run_id_.c_str());
}

Journal::Journal(std::filesystem::path path, const std::string& run)
    : path_(std::move(path)), file_("MlflowWriter", path_, AppendFile::Kind::kLines) {
  std::error_code ignored;
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), ignored);
  fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  TORCH_CHECK(fd_, "cannot open ", path_.string(), ": ", std::strerror(errno));
  TORCH_CHECK(::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0, path_.string(),
              " belongs to a process that still logs to this run");
  const int64_t mark_length = static_cast<int64_t>(mark().size());
  size_ = ::lseek(fd_.get(), 0, SEEK_END);
  if (size_ == 0) {
    sent_ = mark_length + static_cast<int64_t>(run.size()) + 1;
    run_ = run;
    TORCH_CHECK(file_.take_over() && file_.append(mark() + run + "\n"), "cannot write to ", path_.string());
    size_ = sent_;
    return;
  }
  const auto lines = read(0, 0);
  const json mark = lines.empty() ? json() : json::parse(lines[0].text, nullptr, /*allow_exceptions=*/false);
  const auto second = lines.empty() ? lines : read(lines[0].end, 0);
  const bool is_journal = mark.is_object() && lines[0].end == mark_length &&
                          mark.value("sent", json()).is_number_integer() &&
                          mark.value("run_id", json()).is_string() &&
                          mark.value("create_tried", json()).is_number_integer() && !second.empty();
  TORCH_CHECK(is_journal, path_.string(),
              " is no journal of an MlflowWriter; give it another spool_directory, or remove the file");
  run_ = second[0].text;
  run_id_ = without_trailing_blanks(mark["run_id"].get<std::string>());
  TORCH_CHECK(run_id_.empty() || is_run_id(run_id_), path_.string(), " has '", printable(run_id_),
              "' for a run, which is no run id of MLflow; remove the file");
  create_tried_ = mark["create_tried"].get<int>() != 0;
  // Cuts off half a line, now that it is certain whose file this is.
  TORCH_CHECK(file_.take_over(), "cannot open ", path_.string());
  size_ = ::lseek(fd_.get(), 0, SEEK_END);
  sent_ = std::clamp(mark["sent"].get<int64_t>(), second[0].end, size_);
}

bool Journal::append(std::string_view line) {
  const std::string whole = std::string(line) + "\n";
  const std::lock_guard lock(mutex_);
  if (!file_.append(whole)) return false;
  size_ += static_cast<int64_t>(whole.size());
  return true;
}

std::vector<Journal::Line> Journal::read(int64_t begin, size_t bytes) const {
  int64_t size = 0;
  {
    const std::lock_guard lock(mutex_);
    size = size_;
  }
  std::vector<Line> lines;
  std::string block(size_t{64} << 10, '\0');
  std::string partial;
  size_t taken = 0;
  for (int64_t at = begin; at < size;) {
    const auto wanted = static_cast<size_t>(std::min<int64_t>(size - at, static_cast<int64_t>(block.size())));
    const ssize_t got = ::pread(fd_.get(), block.data(), wanted, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    for (const char c : std::string_view(block.data(), static_cast<size_t>(got))) {
      ++at;
      if (c != '\n') {
        partial += c;
        continue;
      }
      if (!lines.empty() && taken + partial.size() > bytes) return lines;
      taken += partial.size();
      lines.push_back({std::exchange(partial, {}), at});
      if (taken >= bytes) return lines;
    }
  }
  return lines;
}

/// A disk that refuses it costs no more than sending again what the server has.
void Journal::write_mark() {
  const std::string line = mark();
  [[maybe_unused]] const ssize_t written = ::pwrite(fd_.get(), line.data(), line.size(), 0);
}

int64_t Journal::sent() const {
  const std::lock_guard lock(mutex_);
  return sent_;
}

bool Journal::all_sent() const {
  const std::lock_guard lock(mutex_);
  return sent_ >= size_;
}

int64_t Journal::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

void Journal::set_sent(int64_t end) {
  const std::lock_guard lock(mutex_);
  sent_ = end;
  if (sent_ >= size_ && size_ > kLarge) {
    const auto start = static_cast<int64_t>(mark().size() + run_.size() + 1);
    // Cut first: a mark past the end means that all was sent.
    if (::ftruncate(fd_.get(), start) == 0) size_ = sent_ = start;
  }
  write_mark();
}

std::string Journal::run_id() const {
  const std::lock_guard lock(mutex_);
  return run_id_;
}

void Journal::set_run_id(const std::string& run_id) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(is_run_id(run_id), "'", printable(run_id), "' is no run id of MLflow");
  run_id_ = run_id;
  write_mark();
}

bool Journal::create_tried() const {
  const std::lock_guard lock(mutex_);
  return create_tried_;
}

void Journal::set_create_tried() {
  const std::lock_guard lock(mutex_);
  create_tried_ = true;
  write_mark();
}

void Journal::rename(const std::filesystem::path& path) {
  const std::lock_guard lock(mutex_);
  // The descriptors stay open, so appending goes on whatever the name is.
  if (::link(path_.c_str(), path.c_str()) != 0) return;
  ::unlink(path_.c_str());
  path_ = path;
  file_.set_path(path);
}

void Journal::remove() {
  const std::lock_guard lock(mutex_);
  ::unlink(path_.c_str());
}

std::filesystem::path Journal::path() const {
  const std::lock_guard lock(mutex_);
  return path_;
}

int64_t Journal::lost() const {
  const std::lock_guard lock(mutex_);
  return file_.lost();
}

}  // namespace lockstep::mlflow::internal

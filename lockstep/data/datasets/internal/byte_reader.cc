#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <zlib.h>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/internal/byte_reader.h>

namespace lockstep::data::internal {
namespace {

constexpr int64_t kBufferSize = 256 * 1024;
constexpr int kGzipOnly = 16;  // added to inflate's window bits: expect gzip's header and check its trailer
constexpr int64_t kBestDeflateRatio = 1032;  // zlib.net/zlib_tech.html: no deflate stream expands further

}  // namespace

ByteReader::ByteReader(std::string path) : path_(std::move(path)), buffer_(kBufferSize) {
  file_.reset(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  TORCH_CHECK(file_, "cannot open ", path_, ": ", std::strerror(errno));
  struct stat status {};
  TORCH_CHECK(::fstat(file_.get(), &status) == 0, "cannot look at ", path_, ": ", std::strerror(errno));
  TORCH_CHECK(S_ISREG(status.st_mode), path_, " is not a regular file");
  file_size_ = status.st_size;
  if (!fill() || available_ < 2 || input_[0] != 0x1f || input_[1] != 0x8b) return;
  inflater_ = std::make_unique<z_stream>();
  const int code = ::inflateInit2(inflater_.get(), MAX_WBITS + kGzipOnly);
  if (code != Z_OK) inflater_.reset();
  TORCH_CHECK(code == Z_OK, "zlib can't start to decompress ", path_, ": ", ::zError(code));
}

ByteReader::~ByteReader() {
  if (inflater_) ::inflateEnd(inflater_.get());
}

int64_t ByteReader::capacity() const {
  if (!compressed()) return file_size_;
  return std::min(file_size_, std::numeric_limits<int64_t>::max() / kBestDeflateRatio) * kBestDeflateRatio;
}

bool ByteReader::fill() {
  // read(2) may deliver less than asked for; two bytes at least are wanted where the file has them, to tell
  // gzip.
  available_ = 0;
  input_ = buffer_.data();
  while (available_ < kBufferSize) {
    const ssize_t got =
        ::read(file_.get(), buffer_.data() + available_, static_cast<size_t>(kBufferSize - available_));
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK(got >= 0, "cannot read ", path_, ": ", std::strerror(errno));
    if (got == 0) break;
    available_ += got;
  }
  return available_ > 0;
}

int64_t ByteReader::read(void* destination, int64_t count) {
  auto* bytes = static_cast<uint8_t*>(destination);
  return compressed() ? read_gzip(bytes, count) : read_plain(bytes, count);
}

int64_t ByteReader::read_plain(uint8_t* destination, int64_t count) {
  int64_t done = 0;
  while (done < count && (available_ > 0 || fill())) {
    const int64_t part = std::min(count - done, available_);
    std::memcpy(destination + done, input_, static_cast<size_t>(part));
    input_ += part;
    available_ -= part;
    done += part;
  }
  return done;
}

int64_t ByteReader::read_gzip(uint8_t* destination, int64_t count) {
  int64_t done = 0;
  while (done < count && !ended_) {
    TORCH_CHECK(available_ > 0 || fill(), path_, ": the gzip stream is truncated: it ends after ", file_size_,
                " bytes, before its checksum; fetch the file again");
    // zlib counts in 32 bits.
    const auto part = static_cast<uInt>(std::min<int64_t>(count - done, std::numeric_limits<uInt>::max()));
    inflater_->next_in = const_cast<Bytef*>(input_);  // zlib doesn't write there; only its type is not const
    inflater_->avail_in = static_cast<uInt>(available_);
    inflater_->next_out = destination + done;
    inflater_->avail_out = part;
    const int code = ::inflate(inflater_.get(), Z_NO_FLUSH);
    input_ = inflater_->next_in;
    available_ = inflater_->avail_in;
    done += part - inflater_->avail_out;
    if (code == Z_STREAM_END) {
      // A gzip file may consist of several members, one after the other.
      if (available_ == 0 && !fill()) {
        ended_ = true;
      } else {
        TORCH_CHECK(input_[0] == 0x1f, path_,
                    ": something that is not gzip follows the gzip stream; fetch it again");
        TORCH_CHECK(::inflateReset(inflater_.get()) == Z_OK, "zlib can't continue with ", path_);
      }
    } else {
      // Z_BUF_ERROR only says that input or room ran out, which the loop sees to.
      TORCH_CHECK(code == Z_OK || code == Z_BUF_ERROR, path_, ": the gzip stream is corrupt: ",
                  inflater_->msg != nullptr ? inflater_->msg : ::zError(code), "; fetch the file again");
    }
  }
  return done;
}

}  // namespace lockstep::data::internal

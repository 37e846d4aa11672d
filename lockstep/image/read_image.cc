#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <iomanip>
#include <span>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/image/internal/decoders.h>
#include <lockstep/image/read_image.h>

namespace lockstep::image {
namespace {

using namespace std::string_view_literals;

bool begins_with(std::span<const uint8_t> bytes, std::string_view magic) {
  return bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
}

std::string first_bytes(std::span<const uint8_t> bytes) {
  std::ostringstream out;
  out << std::hex << std::setfill('0');
  for (const uint8_t byte : bytes.first(std::min<size_t>(bytes.size(), 8))) {
    out << ' ' << std::setw(2) << static_cast<int>(byte);
  }
  return out.str();
}

}  // namespace

void internal::check_size(int64_t width, int64_t height, const ImageReadOptions& options,
                          std::string_view name) {
  // libjpeg's and libpng's sizes have 16 and 31 bits, so the product fits.
  TORCH_CHECK(width * height <= options.max_pixels, name, ": the image has ", width, "×", height,
              " pixels, and ImageReadOptions.max_pixels is ", options.max_pixels,
              "; raise that if the file can be trusted");
}

at::Tensor read_file(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TORCH_CHECK(file, "cannot open ", path, ": ", std::strerror(errno));
  struct stat status {};
  TORCH_CHECK(::fstat(file.get(), &status) == 0, "cannot look at ", path, ": ", std::strerror(errno));
  TORCH_CHECK(S_ISREG(status.st_mode), path, " is not a regular file");
  at::Tensor bytes = at::empty({status.st_size}, at::TensorOptions().dtype(at::kByte));
  auto* data = bytes.mutable_data_ptr<uint8_t>();
  int64_t done = 0;
  while (done < status.st_size) {
    const ssize_t got = ::read(file.get(), data + done, static_cast<size_t>(status.st_size - done));
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK(got >= 0, "cannot read ", path, ": ", std::strerror(errno));
    if (got == 0) break;  // another process made it shorter meanwhile
    done += got;
  }
  return bytes.narrow(0, 0, done);
}

at::Tensor decode_image(const at::Tensor& input, const ImageReadOptions& options, std::string_view name) {
  TORCH_CHECK_VALUE(input.defined() && input.device().is_cpu() && input.scalar_type() == at::kByte &&
                        input.dim() == 1 && input.is_contiguous(),
                    "decode_image takes the bytes of a file, as read_file() returns them: a contiguous uint8 "
                    "tensor of one dimension on the CPU");
  const std::span<const uint8_t> bytes(input.const_data_ptr<uint8_t>(), static_cast<size_t>(input.numel()));
  TORCH_CHECK(!bytes.empty(), name, ": no bytes; an image was expected");
  if (begins_with(bytes, "\xff\xd8\xff"sv)) return internal::decode_jpeg(bytes, options, name);
  if (begins_with(bytes, "\x89PNG\r\n\x1a\n"sv)) return internal::decode_png(bytes, options, name);
  TORCH_CHECK(false, name, ": neither a JPEG nor a PNG image; its first bytes are", first_bytes(bytes),
              ". Convert it, or take it out of the data set");
}

at::Tensor read_image(const std::string& path, const ImageReadOptions& options) {
  return decode_image(read_file(path), options, path);
}

}  // namespace lockstep::image

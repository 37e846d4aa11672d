#include <algorithm>
#include <cstddef>
#include <cstring>
#include <jpeglib.h>
#include <vector>
// jpeglib.h first: it doesn't include what jerror.h needs
#include <jerror.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/image/internal/c_failure.h>
#include <lockstep/image/internal/decoders.h>
#include <lockstep/image/internal/exif.h>

namespace lockstep::image::internal {
namespace {

constexpr int kExifMarker = JPEG_APP0 + 1;
constexpr std::string_view kExifHeader("Exif\0\0", 6);
// Each passes over the whole image, and a few bytes of a file make one. libjpeg's and mozjpeg's encoders
// write less than a quarter of that.
constexpr int kMostScans = 100;

/// libjpeg's view of a decoder's failure; `base` first, for libjpeg hands out its address.
struct Errors {
  jpeg_error_mgr base{};
  CFailure failure;
  bool strict = false;
};

Errors& errors_of(j_common_ptr info) {
  return *reinterpret_cast<Errors*>(info->err);
}

void on_error(j_common_ptr info) {
  char message[JMSG_LENGTH_MAX];
  info->err->format_message(info, message);
  errors_of(info).failure.fail(message);
}

/// Level -1 is a warning, above are traces. libjpeg paints over missing data and warns; an image that lacks
/// its end is an error here, as it is for Pillow and torchvision.
void on_message(j_common_ptr info, int level) {
  if (level >= 0) return;
  if (info->err->msg_code == JWRN_JPEG_EOF) {
    errors_of(info).failure.fail("the JPEG data are truncated; fetch the file again");
  }
  if (errors_of(info).strict) on_error(info);
}

void on_progress(j_common_ptr info) {
  const auto* decoder = reinterpret_cast<j_decompress_ptr>(info);
  if (decoder->input_scan_number > kMostScans) {
    errors_of(info).failure.fail("a JPEG with more than 100 scans; it only serves to keep readers busy");
  }
}

/// v·k/255, rounded, as Pillow computes it (libImaging/Convert.c, cmyk2rgb): Adobe's CMYK is stored inverted.
uint8_t ink_to_light(int ink, int black) {
  const int product = black * (255 - ink) + 128;
  return static_cast<uint8_t>(std::clamp(black - (((product >> 8) + product) >> 8), 0, 255));
}

/// Luma by ITU-R 601-2, in Pillow's and torchvision's 16 fractional bits.
uint8_t rgb_to_gray(int red, int green, int blue) {
  return static_cast<uint8_t>((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16);
}

void convert_cmyk_row(const uint8_t* cmyk, uint8_t* out, int64_t width, int64_t channels) {
  for (int64_t i = 0; i < width; ++i, cmyk += 4, out += channels) {
    const uint8_t red = ink_to_light(cmyk[0], cmyk[3]);
    const uint8_t green = ink_to_light(cmyk[1], cmyk[3]);
    const uint8_t blue = ink_to_light(cmyk[2], cmyk[3]);
    if (channels == 1) {
      out[0] = rgb_to_gray(red, green, blue);
    } else {
      out[0] = red;
      out[1] = green;
      out[2] = blue;
    }
  }
}

/// One image. Every call of libjpeg is within run().
class JpegDecoder {
 public:
  JpegDecoder(std::span<const uint8_t> bytes, const ImageReadOptions& options, std::string_view name)
      : bytes_(bytes), options_(options), name_(name) {
    info_.err = ::jpeg_std_error(&errors_.base);
    errors_.base.error_exit = on_error;
    errors_.base.emit_message = on_message;
    errors_.base.output_message = [](j_common_ptr) {};
    errors_.strict = options.strict;
    progress_.progress_monitor = on_progress;
  }
  ~JpegDecoder() { ::jpeg_destroy_decompress(&info_); }  // safe before jpeg_create_decompress, too
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  at::Tensor decode() {
    read_header();
    const int64_t channels = choose_output();
    run([this] { ::jpeg_start_decompress(&info_); });
    const auto width = static_cast<int64_t>(info_.output_width);
    const auto height = static_cast<int64_t>(info_.output_height);
    at::Tensor image = at::empty({height, width, channels}, at::TensorOptions().dtype(at::kByte));
    read_rows(image.mutable_data_ptr<uint8_t>(), width, channels);
    const at::Tensor result = image.permute({2, 0, 1});
    return options_.apply_exif_orientation ? apply_orientation(result, orientation()) : result;
  }

 private:
  template <class Call>
  void run(const Call& call) {
    TORCH_CHECK(errors_.failure.run(call), name_, ": ", errors_.failure.message());
  }

  void read_header() {
    run([this] {
      jpeg_create_decompress(&info_);
      info_.progress = &progress_;
      ::jpeg_mem_src(&info_, bytes_.data(), static_cast<unsigned long>(bytes_.size()));
      if (options_.apply_exif_orientation) ::jpeg_save_markers(&info_, kExifMarker, 0xffff);
      ::jpeg_read_header(&info_, TRUE);
    });
    check_size(info_.image_width, info_.image_height, options_, name_);
  }

  /// Sets the colour space and the scale to decode to; returns the result's channels.
  int64_t choose_output() {
    const bool gray = info_.jpeg_color_space == JCS_GRAYSCALE;
    const bool cmyk = info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
    TORCH_CHECK(gray || cmyk || info_.jpeg_color_space == JCS_YCbCr || info_.jpeg_color_space == JCS_RGB,
                name_, ": a JPEG of ", info_.num_components,
                " components in a colour space that is not supported; gray, RGB, YCbCr, CMYK and YCCK are. "
                "Convert the file");
    TORCH_CHECK_VALUE(options_.mode != ImageReadMode::kGrayAlpha && options_.mode != ImageReadMode::kRgbAlpha,
                      name_,
                      ": a JPEG has no alpha channel; read it with ImageReadMode::kUnchanged, kGray or kRgb");
    const bool to_gray =
        options_.mode == ImageReadMode::kGray || (options_.mode == ImageReadMode::kUnchanged && gray);
    const bool keep_cmyk = cmyk && options_.mode == ImageReadMode::kUnchanged;
    if (cmyk) {
      info_.out_color_space = JCS_CMYK;
    } else {
      info_.out_color_space = to_gray ? JCS_GRAYSCALE : JCS_RGB;
    }
    if (options_.minimum_size > 0) {
      const int64_t edge = std::min<int64_t>(info_.image_width, info_.image_height);
      info_.scale_num = 1;
      for (const unsigned scale : {8U, 4U, 2U, 1U}) {
        info_.scale_denom = scale;
        if (edge / scale >= options_.minimum_size) break;
      }
    }
    if (keep_cmyk) return 4;
    return to_gray ? 1 : 3;
  }

  void read_rows(uint8_t* rows, int64_t width, int64_t channels) {
    const bool convert = info_.out_color_space == JCS_CMYK && channels != 4;
    std::vector<uint8_t> cmyk(convert ? static_cast<size_t>(width) * 4 : 0);
    run([&] {
      while (info_.output_scanline < info_.output_height) {
        uint8_t* row = rows + static_cast<int64_t>(info_.output_scanline) * width * channels;
        JSAMPROW target = convert ? cmyk.data() : row;
        ::jpeg_read_scanlines(&info_, &target, 1);
        if (convert) convert_cmyk_row(cmyk.data(), row, width, channels);
      }
    });
  }

  int orientation() const {
    for (const jpeg_marker_struct* marker = info_.marker_list; marker != nullptr; marker = marker->next) {
      if (marker->marker != kExifMarker || marker->data_length < kExifHeader.size()) continue;
      if (std::memcmp(marker->data, kExifHeader.data(), kExifHeader.size()) != 0) continue;
      return exif_orientation(std::span<const uint8_t>(marker->data, marker->data_length).subspan(6));
    }
    return 1;
  }

  const std::span<const uint8_t> bytes_;
  const ImageReadOptions& options_;
  const std::string_view name_;
  Errors errors_;
  jpeg_progress_mgr progress_{};
  jpeg_decompress_struct info_{};
};

}  // namespace

at::Tensor decode_jpeg(std::span<const uint8_t> bytes, const ImageReadOptions& options,
                       std::string_view name) {
  return JpegDecoder(bytes, options, name).decode();
}

}  // namespace lockstep::image::internal

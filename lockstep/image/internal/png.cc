#include <bit>
#include <cstring>
#include <png.h>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/image/internal/c_failure.h>
#include <lockstep/image/internal/decoders.h>
#include <lockstep/image/internal/exif.h>

namespace lockstep::image::internal {
namespace {

// torchvision's weights of red and green; blue has the rest.
constexpr double kRedWeight = 0.2989;
constexpr double kGreenWeight = 0.587;

/// One image. Every call of libpng that can fail is within run().
class PngDecoder {
 public:
  PngDecoder(std::span<const uint8_t> bytes, const ImageReadOptions& options, std::string_view name)
      : rest_(bytes), options_(options), name_(name) {
    // Before there is a png_struct, libpng returns null instead of failing.
    png_ = ::png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
    if (png_ != nullptr) info_ = ::png_create_info_struct(png_);
    if (info_ == nullptr) ::png_destroy_read_struct(&png_, &info_, nullptr);
    TORCH_CHECK(info_ != nullptr, name_, ": libpng can't start, for lack of memory or as it was built with ",
                PNG_LIBPNG_VER_STRING, " and another version is loaded");
  }
  ~PngDecoder() { ::png_destroy_read_struct(&png_, &info_, nullptr); }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;

  at::Tensor decode() {
    read_header();
    const bool wide = bit_depth_ == 16 && !options_.eight_bit;
    run([&] { choose_output(wide); });
    const auto width = static_cast<int64_t>(width_);
    const auto height = static_cast<int64_t>(height_);
    const int64_t channels = ::png_get_channels(png_, info_);
    at::Tensor image =
        at::empty({height, width, channels}, at::TensorOptions().dtype(wide ? at::kUInt16 : at::kByte));
    const auto row_bytes = static_cast<int64_t>(::png_get_rowbytes(png_, info_));
    TORCH_CHECK(row_bytes * height == static_cast<int64_t>(image.nbytes()), name_, ": libpng makes rows of ",
                row_bytes, " bytes of a PNG of ", width, " pixels a row and ", channels, " channels");
    std::vector<png_bytep> rows(height_);
    auto* row = static_cast<png_bytep>(image.mutable_data_ptr());
    for (size_t i = 0; i < rows.size(); ++i, row += row_bytes) rows[i] = row;
    run([&] { ::png_read_image(png_, rows.data()); });
    const at::Tensor result = image.permute({2, 0, 1});
    return options_.apply_exif_orientation ? apply_orientation(result, orientation()) : result;
  }

 private:
  static void on_error(png_structp png, png_const_charp message) {
    static_cast<PngDecoder*>(::png_get_error_ptr(png))->failure_.fail(message);
  }
  static void on_warning(png_structp /*png*/, png_const_charp /*message*/) {}

  static void on_read(png_structp png, png_bytep destination, size_t count) {
    auto& rest = static_cast<PngDecoder*>(::png_get_io_ptr(png))->rest_;
    if (count > rest.size()) ::png_error(png, "the PNG data are truncated; fetch the file again");
    std::memcpy(destination, rest.data(), count);
    rest = rest.subspan(count);
  }

  template <class Call>
  void run(const Call& call) {
    TORCH_CHECK(failure_.run(call), name_, ": ", failure_.message());
  }

  void read_header() {
    run([this] {
      ::png_set_read_fn(png_, this, on_read);
      ::png_set_user_limits(png_, PNG_UINT_31_MAX, PNG_UINT_31_MAX);  // check_size() limits, and says so
      // Texts can be large when decompressed, and they are not used here.
      ::png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER,
                                    reinterpret_cast<png_const_bytep>("tEXt\0zTXt\0iTXt\0sPLT\0"), 4);
      ::png_read_info(png_, info_);
      int interlace = 0;
      ::png_get_IHDR(png_, info_, &width_, &height_, &bit_depth_, &color_type_, &interlace, nullptr, nullptr);
      ::png_set_interlace_handling(png_);
    });
    check_size(width_, height_, options_, name_);
  }

  /// Tells libpng what to make of the file's pixels; torchvision/csrc/io/image/cpu/decode_png.cpp.
  void choose_output(bool wide) {
    const bool palette = (color_type_ & PNG_COLOR_MASK_PALETTE) != 0;
    const bool color = (color_type_ & PNG_COLOR_MASK_COLOR) != 0;
    bool alpha = (color_type_ & PNG_COLOR_MASK_ALPHA) != 0;
    if (color_type_ == PNG_COLOR_TYPE_GRAY && bit_depth_ < 8) ::png_set_expand_gray_1_2_4_to_8(png_);
    if (bit_depth_ == 16 && !wide) ::png_set_strip_16(png_);
    if (wide && std::endian::native == std::endian::little) ::png_set_swap(png_);
    if (options_.mode == ImageReadMode::kUnchanged) {
      ::png_set_packing(png_);  // an index takes a byte
    } else {
      if (palette) {
        ::png_set_palette_to_rgb(png_);
        alpha = ::png_get_valid(png_, info_, PNG_INFO_tRNS) != 0;  // which palette_to_rgb makes alpha of
      }
      const bool want_alpha =
          options_.mode == ImageReadMode::kGrayAlpha || options_.mode == ImageReadMode::kRgbAlpha;
      const bool want_color =
          options_.mode == ImageReadMode::kRgb || options_.mode == ImageReadMode::kRgbAlpha;
      if (alpha && !want_alpha) ::png_set_strip_alpha(png_);
      if (!alpha && want_alpha) ::png_set_add_alpha(png_, wide ? 0xffff : 0xff, PNG_FILLER_AFTER);
      if (color && !want_color) {
        ::png_set_rgb_to_gray(png_, PNG_ERROR_ACTION_NONE, kRedWeight, kGreenWeight);
      }
      if (!color && want_color) ::png_set_gray_to_rgb(png_);
    }
    ::png_read_update_info(png_, info_);
  }

  int orientation() {
    png_uint_32 size = 0;
    png_bytep exif = nullptr;
    if (::png_get_eXIf_1(png_, info_, &size, &exif) == 0) return 1;
    return exif_orientation({exif, size});
  }

  std::span<const uint8_t> rest_;  // what libpng has not read yet
  const ImageReadOptions& options_;
  const std::string_view name_;
  CFailure failure_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  png_uint_32 width_ = 0;
  png_uint_32 height_ = 0;
  int bit_depth_ = 0;
  int color_type_ = 0;
};

}  // namespace

at::Tensor decode_png(std::span<const uint8_t> bytes, const ImageReadOptions& options,
                      std::string_view name) {
  return PngDecoder(bytes, options, name).decode();
}

}  // namespace lockstep::image::internal

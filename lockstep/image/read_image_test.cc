#include <gmock/gmock.h>

#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/image/internal/exif.h>
#include <lockstep/image/read_image.h>
#include <lockstep/image/testing/encode.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::image::read_image_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The decoded image, or the error's text.
struct Outcome {
  at::Tensor image;
  std::string error;
};

Outcome decode(const std::string& content, const ImageReadOptions& options = {}) {
  try {
    return {decode_image(to_bytes(content), options, "the file"), ""};
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("the file: "));
    return {{}, error.what_without_backtrace()};
  }
}

/// All kinds of file, small.
std::vector<std::string> files() {
  return {encode_jpeg(waves(19, 33, 3)), encode_jpeg(waves(19, 33, 3), 60, /*progressive=*/true),
          encode_jpeg(waves(8, 11, 1)),  encode_png(waves(9, 7, 1)),
          encode_png(waves(9, 7, 2)),    encode_png(waves(9, 7, 3)),
          encode_png(waves(9, 7, 4))};
}

void put_big_endian(std::string& bytes, size_t at, uint32_t value, size_t count) {
  for (size_t i = 0; i < count; ++i) bytes[at + i] = static_cast<char>(value >> 8 * (count - 1 - i));
}

TEST(ReadImage, PngPixelsAreTheEncodedOnes) {
  for (int64_t channels = 1; channels <= 4; ++channels) {
    const at::Tensor pixels = waves(13, 21, channels);
    const at::Tensor image = decode(encode_png(pixels)).image;
    EXPECT_TRUE(at::equal(image, pixels.permute({2, 0, 1}))) << channels;
    EXPECT_EQ(image.stride(0), 1) << "channels lie side by side, as Resize likes them";
  }
}

TEST(ReadImage, EveryTruncationIsAnErrorOrCostsNoPixel) {
  for (const std::string& file : files()) {
    const at::Tensor whole = decode(file).image;
    ASSERT_TRUE(whole.defined());
    int64_t errors = 0;
    for (size_t length = 0; length < file.size(); ++length) {
      const Outcome outcome = decode(file.substr(0, length));
      // What follows the pixels (PNG's end mark) may be missing.
      if (outcome.error.empty()) {
        EXPECT_TRUE(at::equal(outcome.image, whole)) << length << " of " << file.size();
        EXPECT_GE(length + 16, file.size());
      } else {
        ++errors;
      }
    }
    EXPECT_GE(errors, static_cast<int64_t>(file.size()) - 16);
    EXPECT_THAT(decode(file.substr(0, file.size() / 2)).error, HasSubstr("truncated; fetch the file again"));
  }
}

TEST(ReadImage, NoFlippedBitCrashesNorChangesAPngUnseen) {
  for (const std::string& file : files()) {
    const bool png = file[1] == 'P';
    const at::Tensor whole = decode(file).image;
    for (size_t bit = 0; bit < 8 * file.size(); bit += png ? 1 : 5) {
      std::string damaged = file;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
      // The limit keeps a header with a false size from costing time.
      const Outcome outcome = decode(damaged, {.max_pixels = 100'000});
      if (!png || !outcome.error.empty()) continue;
      EXPECT_TRUE(at::equal(outcome.image, whole)) << "bit " << bit;
    }
  }
}

TEST(ReadImage, ReservesNoMemoryForMorePixelsThanAllowed) {
  const std::string png = encode_png(waves(4, 5, 3));
  EXPECT_THAT(decode(png, {.max_pixels = 19}).error,
              AllOf(HasSubstr("5×4 pixels"), HasSubstr("ImageReadOptions.max_pixels is 19")));
  EXPECT_EQ(decode(png, {.max_pixels = 20}).error, "");
  std::string jpeg = encode_jpeg(waves(4, 5, 3));
  EXPECT_THAT(decode(jpeg, {.max_pixels = 19}).error, HasSubstr("max_pixels is 19"));
  // A header that tells the format's largest size: were memory reserved, the error would be the allocator's.
  const size_t frame = jpeg.find("\xff\xc0");
  put_big_endian(jpeg, frame + 5, 65'500, 2);
  put_big_endian(jpeg, frame + 7, 65'500, 2);
  EXPECT_THAT(decode(jpeg).error, HasSubstr("65500×65500 pixels"));
}

TEST(ReadImage, WhatDecodersPaintOverIsAnErrorWhenStrict) {
  std::string file = encode_jpeg(waves(64, 64, 3));
  const size_t scan = file.find("\xff\xda");
  file.erase(scan + 30, file.size() - scan - 40);  // most of the pixels, but the end mark is there
  file.replace(file.size() - 2, 2, "\xff\xd9");
  EXPECT_EQ(decode(file).error, "");
  EXPECT_THAT(decode(file, {.strict = true}).error, HasSubstr("Corrupt JPEG data"));
  EXPECT_EQ(decode(encode_jpeg(waves(64, 64, 3)), {.strict = true}).error, "");
}

TEST(ReadImage, SaysWhatIsNoImage) {
  EXPECT_THAT(decode("").error, HasSubstr("no bytes"));
  EXPECT_THAT(decode("GIF89a and so on").error,
              HasSubstr("neither a JPEG nor a PNG image; its first bytes are 47 49 46 38 39 61 20 61"));
  EXPECT_THAT(decode("\xff\xd8\xff").error, HasSubstr("truncated"));
  EXPECT_THAT(decode(encode_jpeg(waves(4, 4, 3)), {.mode = ImageReadMode::kRgbAlpha}).error,
              HasSubstr("a JPEG has no alpha channel"));
}

TEST(ReadImage, ErrorsNameTheFile) {
  const testing::TemporaryFolder folder;
  const auto error_of = [](const std::string& path) {
    return testing::message_of<c10::Error>([&] { read_image(path); });
  };
  const std::string text = folder.write("notes.jpg", "no image");
  EXPECT_THAT(error_of(text), HasSubstr(text + ": neither a JPEG nor a PNG"));
  const std::string cut = folder.write("cut.jpg", encode_jpeg(waves(40, 40, 3)).substr(0, 700));
  EXPECT_THAT(error_of(cut), HasSubstr(cut + ": the JPEG data are truncated"));
  EXPECT_THAT(error_of(folder.path("absent.png")),
              HasSubstr("cannot open " + folder.path("absent.png") + ": No such file or directory"));
  EXPECT_THAT(error_of(folder.path("")), HasSubstr("is not a regular file"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([] { decode_image(at::Tensor()); }),
              HasSubstr("takes the bytes of a file"));
}

TEST(ReadImage, AFileWithCountlessScansIsRefused) {
  // A progressive file, its last scan repeated: few bytes for much work.
  const std::string file = encode_jpeg(waves(16, 16, 1), 80, /*progressive=*/true);
  const size_t last = file.rfind("\xff\xda");
  const std::string scan = file.substr(last, file.size() - 2 - last);
  std::string many = file.substr(0, file.size() - 2);
  for (int i = 0; i < 110; ++i) many += scan;
  EXPECT_THAT(decode(many + "\xff\xd9").error, HasSubstr("more than 100 scans"));
}

TEST(ExifOrientation, TakesDamageForUpright) {
  const auto orientation = [](const std::string& tiff) {
    return internal::exif_orientation({reinterpret_cast<const uint8_t*>(tiff.data()), tiff.size()});
  };
  const std::string good("MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0", 22);
  EXPECT_EQ(orientation(good), 6);
  for (size_t length = 0; length < good.size(); ++length) {
    const int got = orientation(good.substr(0, length));
    EXPECT_TRUE(got == 1 || (got == 6 && length >= 20)) << length;
  }
  std::string endless = good;
  endless.replace(8, 2, "\xff\xff");  // 65535 entries
  EXPECT_EQ(orientation(endless), 6);
  std::string elsewhere = good;
  elsewhere.replace(4, 4, "\xff\xff\xff\xff");
  EXPECT_EQ(orientation(elsewhere), 1);
}

}  // namespace
}  // namespace lockstep::image::read_image_test

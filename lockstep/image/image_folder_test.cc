#include <gmock/gmock.h>
#include <thread>

#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/image/image_folder.h>
#include <lockstep/image/random_transforms.h>
#include <lockstep/image/read_image.h>
#include <lockstep/image/testing/encode.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::image::image_folder_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ImageFolderTest : public ::testing::Test {
 protected:
  ImageFolderTest() {
    for (int64_t i = 0; i < 6; ++i) {
      const at::Tensor image = waves(40 + i, 50 - i, 3);
      const std::string name = (i % 2 == 0 ? "cat/" : "dog/") + std::to_string(i);
      i < 3 ? folder_.write(name + ".png", encode_png(image))
            : folder_.write(name + ".jpg", encode_jpeg(image));
    }
  }

  ImageFolder crops(uint64_t seed = 0) const {
    return ImageFolder(
        folder_.path(""),
        {.transform = Compose({RandomResizedCrop(16), RandomHorizontalFlip(), ToTensor()}), .seed = seed});
  }

  testing::TemporaryFolder folder_;
};

TEST_F(ImageFolderTest, GivesImageAndClass) {
  const ImageFolder folder(folder_.path(""));
  ASSERT_EQ(folder.size(), 6);
  EXPECT_EQ(folder.classes(), std::vector<std::string>({"cat", "dog"}));
  EXPECT_EQ(folder.targets(), std::vector<int64_t>({0, 0, 0, 1, 1, 1}));
  const data::Example example = folder.get(3);
  EXPECT_EQ(folder.samples()[3].first, folder_.path("") + "dog/1.png");
  EXPECT_TRUE(at::equal(example.data, waves(41, 49, 3).permute({2, 0, 1})));
  EXPECT_EQ(example.target.item<int64_t>(), 1);
}

TEST_F(ImageFolderTest, ChanceDependsOnSeedEpochAndIndexAlone) {
  ImageFolder folder = crops();
  const at::Tensor first = folder.get(2).data;
  folder.get(4);
  EXPECT_TRUE(at::equal(folder.get(2).data, first)) << "not on what was asked for before";
  EXPECT_TRUE(at::equal(crops().get(2).data, first));
  EXPECT_FALSE(at::equal(crops(1).get(2).data, first));
  folder.set_epoch(1);
  EXPECT_FALSE(at::equal(folder.get(2).data, first));
  folder.set_epoch(0);
  EXPECT_TRUE(at::equal(folder.get(2).data, first));
}

TEST_F(ImageFolderTest, ThreadsMayReadAtOnce) {
  const ImageFolder folder = crops();
  std::vector<at::Tensor> expected;
  for (int64_t i = 0; i < folder.size(); ++i) expected.push_back(folder.get(i).data);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t i = 0; i < 24; ++i) {
        const int64_t index = (i + thread) % folder.size();
        if (!at::equal(folder.get(index).data, expected[static_cast<size_t>(index)])) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ImageFolderTest, FeedsADataLoader) {
  const ImageFolder folder = crops();
  data::DataLoader loader(folder, {.batch_size = 4, .num_workers = 1});
  int64_t seen = 0;
  for (const data::Example& batch : loader) {
    EXPECT_EQ(batch.data.sizes().slice(1), at::IntArrayRef({3, 16, 16}));
    EXPECT_TRUE(at::equal(batch.data[0], folder.get(seen).data));
    seen += batch.target.size(0);
  }
  EXPECT_EQ(seen, 6);
}

TEST_F(ImageFolderTest, TakesOtherLoadersFilesAndTargets) {
  const ImageFolder folder(
      folder_.path(""),
      {.target_transform = [](int64_t target) { return 10 - target; },
       .loader = [](const std::string& path) { return read_image(path, {.mode = ImageReadMode::kGray}); },
       .is_valid_file = [](const std::string& path) { return path.ends_with("5.jpg"); },
       .allow_empty = true});
  ASSERT_EQ(folder.size(), 1);
  EXPECT_EQ(folder.get(0).data.sizes(), at::IntArrayRef({1, 45, 45}));
  EXPECT_EQ(folder.get(0).target.item<int64_t>(), 9);
  EXPECT_EQ(ImageFolder(folder_.path(""), {.extensions = {".jpg"}}).size(), 3);
}

TEST_F(ImageFolderTest, ErrorsNameWhatIsWrong) {
  using testing::message_of;
  const std::string root = folder_.path("");
  EXPECT_THAT(message_of<c10::IndexError>([&] { ImageFolder(root).get(6); }),
              HasSubstr("index 6 is out of range for an ImageFolder with 6 samples"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                ImageFolder(
                    root, {.extensions = {".png"}, .is_valid_file = [](const std::string&) { return true; }});
              }),
              HasSubstr("extensions and is_valid_file cannot both be given"));
  EXPECT_THAT(message_of<c10::Error>([&] { ImageFolder(root, {.extensions = {".gif"}}); }),
              AllOf(HasSubstr("Found no valid file for the classes cat, dog"), HasSubstr("are: .gif")));
  EXPECT_THAT(message_of<c10::ValueError>([&] { ImageFolder(root, {.transform = RandomCrop(45)}).get(0); }),
              AllOf(HasSubstr("Required crop size"), HasSubstr("while transforming " + root + "cat/0.png")));
  // A format that torchvision's list has and that can't be read here is an error, not left out.
  folder_.write("cat/picture.webp", "RIFF----WEBP");
  const ImageFolder folder(root);
  EXPECT_EQ(folder.size(), 7);
  EXPECT_THAT(message_of<c10::Error>([&] { folder.get(3); }),
              AllOf(HasSubstr("cat/picture.webp"), HasSubstr("neither a JPEG nor a PNG")));
}

}  // namespace
}  // namespace lockstep::image::image_folder_test

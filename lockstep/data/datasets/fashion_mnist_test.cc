#include <filesystem>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/data/datasets/fashion_mnist.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::data::fashion_mnist_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

constexpr int64_t kPixels = 28 * 28;
constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";

/// Image i has the bytes i, i + 1, …
std::string image_file(uint32_t count) {
  std::string bytes;
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t pixel = 0; pixel < kPixels; ++pixel) bytes += static_cast<char>(i + pixel);
  }
  return idx_header(8, {count, 28, 28}) + bytes;
}

std::string label_file(const std::string& labels) {
  return idx_header(8, {static_cast<uint32_t>(labels.size())}) + labels;
}

class FashionMnistTest : public ::testing::Test {
 protected:
  void write(const std::string& images, const std::string& labels) {
    folder_.write("train-images-idx3-ubyte", images);
    folder_.write("train-labels-idx1-ubyte", labels);
  }
  std::string error(bool train = true) {
    return message_of<c10::Error>([&] { FashionMnist(folder_.path(""), train); });
  }

  testing::TemporaryFolder folder_;
};

TEST_F(FashionMnistTest, GathersAndConvertsAsToTensorDoes) {
  write(image_file(3), label_file(std::string("\x09\x00\x04", 3)));
  const FashionMnist set(folder_.path(""));
  ASSERT_EQ(set.size(), 3);
  const std::vector<int64_t> indices = {2, 0, 2, 1};
  const Example batch = set.get_batch(indices);
  const auto chosen = torch::tensor(indices);
  // 784 pixels hold every value of a byte; equal, not merely close.
  EXPECT_TRUE(
      at::equal(batch.data, set.images().index_select(0, chosen).unsqueeze(1).to(at::kFloat).div(255)));
  EXPECT_TRUE(at::equal(batch.target, torch::tensor({4, 9, 4, 0}, at::kLong)));
  for (int64_t i = 0; i < 3; ++i) {
    const Example one = set.get(i);
    EXPECT_EQ(one.data.sizes(), at::IntArrayRef({1, 28, 28}));
    EXPECT_EQ(one.target.dim(), 0);
    EXPECT_TRUE(at::equal(one.data, set.images()[i].unsqueeze(0).to(at::kFloat).div(255)));
  }
  EXPECT_EQ(set.get_batch({}).data.sizes(), at::IntArrayRef({0, 1, 28, 28}));
}

TEST_F(FashionMnistTest, RefusesAnIndexOutside) {
  write(image_file(2), label_file("\x01\x02"));
  const FashionMnist set(folder_.path(""));
  EXPECT_THROW(set.get(2), c10::IndexError);
  EXPECT_THROW(set.get(-1), c10::IndexError);
  EXPECT_THROW(set.get_batch(std::vector<int64_t>{0, 5}), c10::IndexError);
}

TEST_F(FashionMnistTest, FindsFilesCompressedAndInSubfolders) {
  for (const std::string subfolder : {"", "fashion-mnist/", "FashionMNIST/raw/"}) {
    const testing::TemporaryFolder folder;
    folder.write(subfolder + "t10k-images-idx3-ubyte.gz", gzip(image_file(2)));
    folder.write(subfolder + "t10k-labels-idx1-ubyte", label_file("\x01\x02"));
    EXPECT_EQ(FashionMnist(folder.path(""), false).size(), 2) << subfolder;
    EXPECT_THROW(FashionMnist(folder.path(""), true), c10::Error) << subfolder;
  }
}

TEST_F(FashionMnistTest, MissingFilesAreNamedWithTheRemedy) {
  EXPECT_THAT(error(), AllOf(HasSubstr(folder_.path("")), HasSubstr("train-images-idx3-ubyte"),
                             HasSubstr("train-labels-idx1-ubyte"), HasSubstr("scripts/quickstart"),
                             HasSubstr("dataset-fashion-mnist")));
  EXPECT_THAT(error(false), HasSubstr("t10k-images-idx3-ubyte"));
  folder_.write("train-images-idx3-ubyte", image_file(1));
  EXPECT_THAT(error(), HasSubstr("no Fashion-MNIST in directory")) << "labels are missing";
}

TEST_F(FashionMnistTest, WrongContentsAreNamed) {
  write(image_file(2), label_file("\x01\x02\x03"));
  EXPECT_THAT(error(), AllOf(HasSubstr("holds 2 images"), HasSubstr("3 labels")));
  write(image_file(3), label_file("\x01\x0a\x03"));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-labels-idx1-ubyte: label 10 at position 1")));
  write(image_file(0), label_file(""));
  EXPECT_THAT(error(), HasSubstr("holds no image"));
  write(label_file("\x01"), label_file("\x01"));
  EXPECT_THAT(error(), HasSubstr("images are Byte [N, 28, 28]"));
  write(idx_header(8, {1, 2, 3}) + "123456", label_file("\x01"));
  EXPECT_THAT(error(), HasSubstr("[1, 2, 3]"));
  write(image_file(1), idx_header(9, {1}) + "\x01");
  EXPECT_THAT(error(), HasSubstr("labels are Byte [N]"));
  write(image_file(1).substr(0, 100), label_file("\x01"));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-images-idx3-ubyte"), HasSubstr("truncated")));
}

TEST_F(FashionMnistTest, ReadsTheRealSet) {
  if (!std::filesystem::exists(kDebianFolder)) {
    GTEST_SKIP() << kDebianFolder << " is not there; Debian's dataset-fashion-mnist provides it";
  }
  for (const bool train : {true, false}) {
    const FashionMnist set(kDebianFolder, train);
    EXPECT_EQ(set.size(), train ? 60000 : 10000);
    const auto counts = at::bincount(set.labels());
    EXPECT_TRUE(at::equal(counts, at::full({10}, set.size() / 10, at::kLong))) << counts;
    if (train) {
      // The known mean and deviation of the training images.
      EXPECT_NEAR(set.images().to(at::kFloat).div(255).mean().item<double>(), 0.2860, 1e-4);
      EXPECT_NEAR(set.images().to(at::kFloat).div(255).std().item<double>(), 0.3530, 1e-4);
    }
  }
}

}  // namespace
}  // namespace lockstep::data::fashion_mnist_test

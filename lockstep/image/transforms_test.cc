#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <lockstep/image/random_transforms.h>
#include <lockstep/image/testing/encode.h>
#include <lockstep/image/transforms.h>

// Values are compared with torchvision's in image_test.py; here is what Python has no word for.
namespace lockstep::image::transforms_test {
namespace {

at::Tensor picture() {
  return waves(40, 50, 3).permute({2, 0, 1});
}

OptionalGenerator seeded(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

TEST(Transform, WrapsAnyCallable) {
  const Transform plain = [](const at::Tensor& image) { return image.add(1); };
  const Transform random = [](const at::Tensor& image, const OptionalGenerator& generator) {
    return image.add(at::rand({1}, generator, at::TensorOptions().dtype(at::kFloat)));
  };
  const at::Tensor zero = at::zeros({1, 1, 1});
  EXPECT_EQ(plain(zero).item<float>(), 1);
  EXPECT_EQ(random(zero, seeded(1)).item<float>(), random(zero, seeded(1)).item<float>());
  EXPECT_NE(random(zero, seeded(1)).item<float>(), random(zero, seeded(2)).item<float>());
  EXPECT_TRUE(Transform()(zero).is_same(zero)) << "an empty one does nothing";
}

TEST(Compose, PassesTheGeneratorOn) {
  const Compose crops({RandomResizedCrop(16), RandomHorizontalFlip(), Compose({RandomCrop(8), ToTensor()})});
  const at::Tensor image = picture();
  const at::Tensor one = crops(image, seeded(1));
  EXPECT_EQ(one.sizes(), at::IntArrayRef({3, 8, 8}));
  EXPECT_TRUE(at::equal(one, crops(image, seeded(1))));
  EXPECT_FALSE(at::equal(one, crops(image, seeded(2))));
}

TEST(RandomTransforms, DrawFromTheDefaultGeneratorUnlessToldOtherwise) {
  const at::Tensor image = picture();
  const RandomCrop crop(20);
  at::manual_seed(3);
  const at::Tensor from_default = crop(image);
  EXPECT_TRUE(at::equal(from_default, crop(image, seeded(3))));
  at::manual_seed(3);
  crop(image, seeded(8));
  EXPECT_TRUE(at::equal(from_default, crop(image))) << "the default generator was not touched";
}

TEST(Transforms, LeaveTheirInputAlone) {
  const at::Tensor image = picture();
  const at::Tensor copy = image.clone();
  const Compose all({Pad(2), RandomCrop(30), RandomHorizontalFlip(1), RandomVerticalFlip(1), Resize(20),
                     CenterCrop({18, 40}), ToTensor(), Normalize({0.5}, {0.2})});
  EXPECT_EQ(all(image, seeded(0)).sizes(), at::IntArrayRef({3, 18, 40}));
  EXPECT_TRUE(at::equal(image, copy));
}

TEST(Resize, IsTheSameForEveryLayout) {
  const at::Tensor image = picture();  // H×W×C in memory
  for (const int64_t size : {13, 77}) {
    EXPECT_TRUE(at::equal(Resize(size)(image), Resize(size)(image.contiguous()))) << size;
    const at::Tensor part = crop(image, 3, 4, 30, 31);
    EXPECT_TRUE(at::equal(Resize(size)(part), Resize(size)(part.contiguous()))) << size;
  }
}

TEST(Crop, FillsWithZeroWhatLiesOutside) {
  const at::Tensor image = at::ones({1, 4, 5});
  EXPECT_EQ(crop(image, -2, -1, 8, 9).sum().item<float>(), 20);
  EXPECT_EQ(crop(image, 2, 3, 10, 10).sum().item<float>(), 4);
  EXPECT_EQ(crop(image, 50, -60, 3, 2).sum().item<float>(), 0);
  EXPECT_EQ(crop(image, 50, -60, 3, 2).sizes(), at::IntArrayRef({1, 3, 2}));
}

}  // namespace
}  // namespace lockstep::image::transforms_test

// Shows that the installed component image can be built against and run: something that is no image is
// refused.
#include <iostream>

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <lockstep/image/image_folder.h>
#include <lockstep/image/random_transforms.h>
#include <lockstep/image/read_image.h>

int main() try {
  const lockstep::image::Compose transforms({lockstep::image::RandomCrop(3), lockstep::image::ToTensor()});
  const at::Tensor bytes = at::zeros({3, 4, 5}, at::TensorOptions().dtype(at::kByte));
  std::cout << "transformed: " << transforms(bytes).sizes() << '\n';
  lockstep::image::decode_image(bytes.view(-1));
} catch (const c10::Error& error) {
  std::cout << "refused: " << error.what_without_backtrace() << '\n';
}

// Decodes and transforms what image_test.py wrote to a file, for comparison with torchvision and Pillow.
//
//   image_driver INPUT OUTPUT
//
// INPUT is a pickled list of dictionaries, OUTPUT a list with a tensor, or an error's text, for each (int32
// where it is uint16):
//   {"bytes": tensor, "mode": int, "exif": bool, "minimum_size": int, "eight_bit": bool, "strict": bool}
//   {"image": tensor, "transforms": "NAME KEY=VALUE … ; NAME …", "seed": int}   seed: at::manual_seed before
//   {"folder": path, "transforms": "…" or "listing"}   listing: a text; otherwise all images, stacked
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <lockstep/image/image_folder.h>
#include <lockstep/image/random_transforms.h>
#include <lockstep/image/read_image.h>
#include <lockstep/image/transforms.h>

namespace {

using namespace lockstep::image;
using Case = c10::Dict<c10::IValue, c10::IValue>;

/// NAME KEY=VALUE …
struct Specification {
  explicit Specification(const std::string& text) {
    std::istringstream words(text);
    words >> name;
    for (std::string word; words >> word;) {
      const size_t equal = word.find('=');
      values[word.substr(0, equal)] = word.substr(equal + 1);
    }
  }
  bool has(const std::string& key) const { return values.contains(key); }
  std::vector<double> numbers(const std::string& key, std::vector<double> otherwise) const {
    if (!has(key)) return otherwise;
    std::vector<double> result;
    std::istringstream in(values.at(key));
    for (std::string number; std::getline(in, number, ',');) result.push_back(std::stod(number));
    return result;
  }
  double number(const std::string& key, double otherwise) const { return numbers(key, {otherwise}).at(0); }
  Size size() const {
    const auto edges = numbers("size", {});
    return edges.size() == 1 ? Size(static_cast<int64_t>(edges[0]))
                             : Size(static_cast<int64_t>(edges.at(0)), static_cast<int64_t>(edges.at(1)));
  }
  InterpolationMode interpolation() const {
    return static_cast<InterpolationMode>(static_cast<int>(number("interpolation", 2)));
  }
  PaddingMode padding_mode() const { return static_cast<PaddingMode>(static_cast<int>(number("mode", 0))); }
  Padding padding() const {
    std::vector<int64_t> sides;
    for (const double side : numbers("padding", {0})) sides.push_back(static_cast<int64_t>(side));
    if (sides.size() == 1) return {sides[0]};
    if (sides.size() == 2) return {sides[0], sides[1]};
    return {sides.at(0), sides.at(1), sides.at(2), sides.at(3)};
  }

  std::string name;
  std::map<std::string, std::string> values;
};

Transform make_transform(const Specification& spec) {
  if (spec.name == "Resize") {
    ResizeOptions options{.interpolation = spec.interpolation(),
                          .antialias = spec.number("antialias", 1) != 0};
    if (spec.has("max_size")) options.max_size = static_cast<int64_t>(spec.number("max_size", 0));
    if (spec.numbers("size", {}).size() == 1) {
      return Resize(static_cast<int64_t>(spec.number("size", 0)), options);
    }
    return Resize(spec.size(), options);
  }
  if (spec.name == "CenterCrop") return CenterCrop(spec.size());
  if (spec.name == "Pad") return Pad(spec.padding(), spec.number("fill", 0), spec.padding_mode());
  if (spec.name == "ToTensor") return ToTensor();
  if (spec.name == "ConvertImageDtype") {
    return ConvertImageDtype(static_cast<at::ScalarType>(static_cast<int>(spec.number("dtype", 0))));
  }
  if (spec.name == "Normalize") return Normalize(spec.numbers("mean", {}), spec.numbers("std", {}));
  if (spec.name == "RandomCrop") {
    RandomCropOptions options{.pad_if_needed = spec.number("pad_if_needed", 0) != 0,
                              .fill = spec.number("fill", 0),
                              .padding_mode = spec.padding_mode()};
    if (spec.has("padding")) options.padding = spec.padding();
    return RandomCrop(spec.size(), options);
  }
  if (spec.name == "RandomResizedCrop") {
    const auto scale = spec.numbers("scale", {0.08, 1});
    const auto ratio = spec.numbers("ratio", {3.0 / 4.0, 4.0 / 3.0});
    return RandomResizedCrop(spec.size(), {.scale = {scale.at(0), scale.at(1)},
                                           .ratio = {ratio.at(0), ratio.at(1)},
                                           .interpolation = spec.interpolation()});
  }
  if (spec.name == "RandomHorizontalFlip") return RandomHorizontalFlip(spec.number("p", 0.5));
  if (spec.name == "RandomVerticalFlip") return RandomVerticalFlip(spec.number("p", 0.5));
  TORCH_CHECK(false, "unknown transform '", spec.name, "'");
}

Compose make_transforms(const std::string& text) {
  std::vector<Transform> transforms;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ';');)
    transforms.push_back(make_transform(Specification(part)));
  return Compose(std::move(transforms));
}

std::string listing(const std::string& root) {
  const ImageFolder folder(root);
  std::ostringstream out;
  for (const std::string& name : folder.classes())
    out << name << '=' << folder.class_to_idx().at(name) << '\n';
  for (const auto& [path, target] : folder.samples()) out << path << ' ' << target << '\n';
  return out.str();
}

at::Tensor all_images(const std::string& root, const std::string& transforms) {
  const ImageFolder folder(root, {.transform = make_transforms(transforms)});
  std::vector<at::Tensor> images;
  for (int64_t i = 0; i < folder.size(); ++i) images.push_back(folder.get(i).data);
  return at::stack(images);
}

c10::IValue answer(const Case& given) {
  const auto text = [&](const char* key) { return given.at(key).toStringRef(); };
  if (given.contains("bytes")) {
    const at::Tensor image = decode_image(given.at("bytes").toTensor(),
                                          {.mode = static_cast<ImageReadMode>(given.at("mode").toInt()),
                                           .apply_exif_orientation = given.at("exif").toBool(),
                                           .minimum_size = given.at("minimum_size").toInt(),
                                           .eight_bit = given.at("eight_bit").toBool(),
                                           .strict = given.at("strict").toBool()});
    // Python's unpickler knows no uint16.
    return image.scalar_type() == at::kUInt16 ? image.to(at::kInt).contiguous() : image.contiguous();
  }
  if (given.contains("image")) {
    at::manual_seed(static_cast<uint64_t>(given.at("seed").toInt()));
    return make_transforms(text("transforms"))(given.at("image").toTensor()).contiguous();
  }
  if (text("transforms") == "listing") return listing(text("folder"));
  return all_images(text("folder"), text("transforms"));
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3, "usage: image_driver INPUT OUTPUT");
  std::ifstream input(argv[1], std::ios::binary);
  TORCH_CHECK(input, "can't read ", argv[1]);
  const auto cases = torch::jit::pickle_load(std::vector<char>(std::istreambuf_iterator<char>(input), {}));
  c10::List<c10::IValue> answers(c10::AnyType::get());
  for (const c10::IValue& given : cases.toListRef()) {
    try {
      answers.push_back(answer(given.toGenericDict()));
    } catch (const c10::Error& error) {
      answers.push_back(std::string(error.what_without_backtrace()));
    }
  }
  const auto bytes = torch::jit::pickle_save(answers);
  std::ofstream output(argv[2], std::ios::binary);
  output.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(output.flush(), "can't write ", argv[2]);
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}

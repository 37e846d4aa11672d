// Reads and writes files for safetensors_test.py. Each line of standard input is one of
//
//   copy <tab> FROM <tab> TO     reads all tensors and the metadata of a safetensors file, and writes another
//   check <tab> FROM             reads all tensors of one
//   checkpoint <tab> DIRECTORY   saves a checkpoint that the test knows
//
// Its answer is one line: "ok", or "error: …", whose line ends are blanks.
#include <algorithm>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/testing/driver.h>

namespace safetensors_driver {
namespace {

using lockstep::StateDict;
using lockstep::to_object;

void save(const std::string& directory) {
  const StateDict model = {{"fc1.weight", at::arange(6, at::kFloat).view({2, 3}).t()},
                           {"fc1.bias", at::ones({3}, at::kHalf)}};
  const StateDict optimizer = {
      {"state", to_object(StateDict{{"fc1.weight", to_object(StateDict{{"exp_avg", at::ones({3, 2})}})}})},
      {"lr", 0.1}};
  lockstep::save_checkpoint(directory, {{"model", to_object(model)}, {"optimizer", to_object(optimizer)}},
                            {{"position", 5}}, {.step = 3, .epoch = 1, .metrics = {{"loss", 0.25}}});
}

void answer(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream in(line);
  for (std::string word; std::getline(in, word, '\t');) words.push_back(word);
  const std::string& verb = words.at(0);
  if (verb == "checkpoint") return save(words.at(1));
  const lockstep::safetensors::SafeOpen file(words.at(1));
  const auto tensors = lockstep::safetensors::load_file(words.at(1));
  TORCH_CHECK(tensors.size() == file.keys().size(), "load_file and SafeOpen differ");
  if (verb == "copy") lockstep::safetensors::save_file(tensors, words.at(2), file.metadata());
}

}  // namespace

LOCKSTEP_DRIVER(safetensors_driver) {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      answer(line);
      std::cout << "ok" << std::endl;
    } catch (const c10::Error& error) {
      std::string text = error.what_without_backtrace();
      std::replace(text.begin(), text.end(), '\n', ' ');
      std::cout << "error: " << text << std::endl;
    }
  }
  return 0;
}

}  // namespace safetensors_driver

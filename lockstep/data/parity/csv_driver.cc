// Reads CSV files for csv_dataset_test.py. Each line of standard input is
//
//   PATH <tab> DELIMITER <tab> HEADER (0 or 1) <tab> TARGET <tab> FEATURES <tab> CATEGORIES
//
// with columns by position, separated by commas, or nothing. Its answer is one line: the features of all rows
// in hexadecimal, a bar, the targets; or "error: …", whose line ends are blanks.
#include <algorithm>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/data/datasets/csv_dataset.h>
#include <lockstep/testing/driver.h>

namespace csv_driver {
namespace {

using lockstep::data::CsvColumn;

std::vector<CsvColumn> columns(const std::string& text) {
  std::vector<CsvColumn> result;
  std::istringstream in(text);
  for (std::string position; std::getline(in, position, ',');)
    result.emplace_back(int64_t{std::stoll(position)});
  return result;
}

void print_numbers(const at::Tensor& numbers) {
  const at::Tensor doubles = numbers.to(at::kDouble).contiguous();
  for (int64_t i = 0; i < doubles.numel(); ++i) std::cout << doubles.const_data_ptr<double>()[i] << ' ';
}

void answer(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream in(line);
  for (std::string word; std::getline(in, word, '\t');) words.push_back(word);
  words.resize(6);
  lockstep::data::CsvOptions options{.features = columns(words[4]),
                                     .categories = columns(words[5]),
                                     .dtype = at::kDouble,
                                     .header = words[2] == "1",
                                     .delimiter = words[1].at(0)};
  if (!words[3].empty()) options.target = int64_t{std::stoll(words[3])};
  const lockstep::data::CsvDataset data(words[0], options);
  print_numbers(data.features());
  std::cout << "| ";
  print_numbers(data.targets());
}

}  // namespace

LOCKSTEP_DRIVER(csv_driver) {
  std::cout << std::hexfloat;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      answer(line);
    } catch (const c10::Error& error) {
      std::string text = error.what_without_backtrace();
      std::replace_if(
          text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
      std::cout << "error: " << text;
    }
    std::cout << '\n';
  }
  return 0;
}

}  // namespace csv_driver

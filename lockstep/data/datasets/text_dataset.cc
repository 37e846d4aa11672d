#include <algorithm>
#include <array>
#include <unordered_set>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/data/datasets/internal/byte_reader.h>
#include <lockstep/data/datasets/internal/utf8.h>
#include <lockstep/data/datasets/text_dataset.h>

namespace lockstep::data {
namespace {

using internal::append_utf8;
using internal::next_code_point;

std::string read_text(const std::string& path, int64_t max_bytes) {
  internal::ByteReader reader(path);
  std::string text;
  if (!reader.compressed()) text.reserve(static_cast<size_t>(std::min(reader.capacity(), max_bytes)));
  std::array<char, 1 << 16> piece;
  while (const int64_t count = reader.read(piece.data(), piece.size())) {
    TORCH_CHECK(static_cast<int64_t>(text.size()) + count <= max_bytes, path,
                " has more than max_bytes = ", max_bytes, " bytes; raise it, or cut the file");
    text.append(piece.data(), static_cast<size_t>(count));
  }
  TORCH_CHECK(!text.empty(), path, " is empty");
  return text;
}

at::ScalarType dtype_for(int64_t vocabulary_size) {
  if (vocabulary_size <= 256) return at::kByte;
  return vocabulary_size <= int64_t{1} << 15 ? at::kShort : at::kInt;
}

/// Calls `visit(pointer)` with a pointer of the tokens' type.
template <class Visit>
void visit_tokens(const at::Tensor& tokens, Visit visit) {
  switch (tokens.scalar_type()) {
    case at::kByte:
      return visit(tokens.mutable_data_ptr<uint8_t>());
    case at::kShort:
      return visit(tokens.mutable_data_ptr<int16_t>());
    default:
      return visit(tokens.mutable_data_ptr<int32_t>());
  }
}

int64_t length_of(std::string_view text, bool bytes) {
  if (bytes) return static_cast<int64_t>(text.size());
  // All bytes but those that continue a character.
  return std::ranges::count_if(text, [](char byte) { return (byte & 0xc0) != 0x80; });
}

}  // namespace

TextVocabulary TextVocabulary::bytes() {
  return {};
}

TextVocabulary TextVocabulary::characters_of(std::string_view text) {
  TORCH_CHECK_VALUE(!text.empty(), "TextVocabulary::characters_of: the text is empty");
  std::unordered_set<char32_t> seen;
  for (int64_t position = 0; position < static_cast<int64_t>(text.size());) {
    seen.insert(next_code_point(text, position));
  }
  TextVocabulary vocabulary;
  vocabulary.characters_.assign(seen.begin(), seen.end());
  std::ranges::sort(vocabulary.characters_);
  return vocabulary;
}

std::string TextVocabulary::characters() const {
  std::string text;
  for (const char32_t character : characters_) append_utf8(character, text);
  return text;
}

int64_t TextVocabulary::number_of(char32_t character, int64_t position) const {
  const auto found = std::ranges::lower_bound(characters_, character);
  if (found == characters_.end() || *found != character) {
    std::string shown;
    append_utf8(character, shown);
    TORCH_CHECK_VALUE(false, "the character '", shown, "' at byte ", position,
                      " is not in the vocabulary of ", size(), " characters");
  }
  return found - characters_.begin();
}

template <class Take>
void TextVocabulary::encode_each(std::string_view text, Take take) const {
  if (is_bytes()) {
    for (const char byte : text) take(static_cast<unsigned char>(byte));
    return;
  }
  // Most characters of most texts are these; the others cost a search.
  constexpr int64_t kUnknown = -1;
  std::array<int64_t, 128> ascii;
  ascii.fill(kUnknown);
  for (size_t i = 0; i < characters_.size() && characters_[i] < 128; ++i) {
    ascii[characters_[i]] = static_cast<int64_t>(i);
  }
  for (int64_t position = 0; position < static_cast<int64_t>(text.size());) {
    const int64_t begin = position;
    const char32_t character = next_code_point(text, position);
    const int64_t known = character < 128 ? ascii[character] : kUnknown;
    take(known != kUnknown ? known : number_of(character, begin));
  }
}

at::Tensor TextVocabulary::encode(std::string_view text) const {
  std::vector<int64_t> numbers;
  numbers.reserve(text.size());
  encode_each(text, [&](int64_t number) { numbers.push_back(number); });
  at::Tensor answer = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::ranges::copy(numbers, answer.mutable_data_ptr<int64_t>());
  return answer;
}

std::string TextVocabulary::decode(const at::Tensor& numbers) const {
  TORCH_CHECK_VALUE(numbers.defined() && numbers.dim() == 1 &&
                        at::isIntegralType(numbers.scalar_type(), /*includeBool=*/false),
                    "TextVocabulary::decode takes N integers, not ", numbers.toString(), " of ",
                    numbers.defined() ? numbers.dim() : 0, " dimensions");
  const at::Tensor plain = numbers.to(at::kCPU, at::kLong).contiguous();
  std::string text;
  for (int64_t i = 0; i < plain.numel(); ++i) {
    const int64_t number = plain.const_data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(number >= 0 && number < size(), "TextVocabulary::decode: number ", number,
                      " at position ", i, " is outside [0, ", size(), ")");
    if (is_bytes()) {
      text += static_cast<char>(number);
    } else {
      append_utf8(characters_[static_cast<size_t>(number)], text);
    }
  }
  return text;
}

TextDataset::TextDataset(const std::string& path, const TextDatasetOptions& options)
    : block_size_(options.block_size), stride_(options.stride) {
  TORCH_CHECK_VALUE(block_size_ >= 1 && stride_ >= 1, "TextDataset: block_size is ", block_size_,
                    " and stride ", stride_, "; both must be 1 at least");
  const std::string text = read_text(path, options.max_bytes);
  try {
    vocabulary_ = options.vocabulary ? *options.vocabulary : TextVocabulary::characters_of(text);
    const int64_t length = length_of(text, vocabulary_.is_bytes());
    // One more, as the last character of a block has a target, too.
    TORCH_CHECK(length > block_size_, "the text has ", length,
                " characters, which is too short for block_size ", block_size_, " and a target after it");
    tokens_ = at::empty({length}, dtype_for(vocabulary_.size()));
    visit_tokens(tokens_, [&]<class Token>(Token* token) {
      vocabulary_.encode_each(text, [&](int64_t number) { *token++ = static_cast<Token>(number); });
    });
  } catch (...) {
    rethrow_with_context("in " + path);
  }
}

int64_t TextDataset::size() const {
  return (tokens_.numel() - block_size_ - 1) / stride_ + 1;
}

Example TextDataset::get(int64_t index) const {
  const std::array<int64_t, 1> indices = {index};
  const Example batch = get_batch(indices);
  return {batch.data.squeeze(0), batch.target.squeeze(0)};
}

Example TextDataset::get_batch(std::span<const int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  Example batch{at::empty({count, block_size_}, at::kLong), at::empty({count, block_size_}, at::kLong)};
  auto* data = batch.data.mutable_data_ptr<int64_t>();
  auto* target = batch.target.mutable_data_ptr<int64_t>();
  visit_tokens(tokens_, [&](const auto* tokens) {
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < size(), "index ", index,
                        " is out of range for TextDataset with ", size(), " blocks");
      const auto* begin = tokens + index * stride_;
      data = std::copy_n(begin, block_size_, data);
      target = std::copy_n(begin + 1, block_size_, target);
    }
  });
  return batch;
}

}  // namespace lockstep::data

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

/// Which number stands for which character of a text, or for which byte. Immutable: any number of threads may
/// use it.
class TextVocabulary {
 public:
  /// The 256 bytes, each standing for itself: for any text, and for what is no text.
  static TextVocabulary bytes();
  /// The characters (Unicode code points) of a UTF-8 text, each once, in the order of their code points.
  /// Throws c10::ValueError, with the position, when it is no UTF-8, and when it is empty.
  static TextVocabulary characters_of(std::string_view text);

  bool is_bytes() const { return characters_.empty(); }
  /// How many there are.
  int64_t size() const { return is_bytes() ? 256 : static_cast<int64_t>(characters_.size()); }
  /// All characters in order, as UTF-8: keep it with a checkpoint, characters_of() makes the same vocabulary
  /// of it. Empty for bytes().
  std::string characters() const;

  /// The numbers of a text, N int64. Throws c10::ValueError, with the position, for characters that are not
  /// in the vocabulary, and for bad UTF-8.
  at::Tensor encode(std::string_view text) const;
  /// The text of N numbers of any integer type. Throws c10::ValueError for another tensor, and
  /// c10::IndexError for numbers outside [0, size()).
  std::string decode(const at::Tensor& numbers) const;

 private:
  friend class TextDataset;
  /// Calls `take(number)` for each character of the text.
  template <class Take>
  void encode_each(std::string_view text, Take take) const;
  int64_t number_of(char32_t character, int64_t position) const;

  std::vector<char32_t> characters_;  // ascending; none: bytes
};

struct TextDatasetOptions {
  int64_t block_size = 128;  ///< characters in a sample
  /// Characters from the beginning of a sample to that of the next. 1: every block of the text is a sample.
  /// block_size: each character is in one.
  int64_t stride = 1;
  /// The vocabulary; that of the text's own characters, unless told: bytes(), or that of the text that a model was trained on.
  std::optional<TextVocabulary> vocabulary = {};
  int64_t max_bytes =
      int64_t{1} << 31;  ///< a longer file is refused, also one that only is long when unpacked
};

/// A text for a model that learns to tell the next character: blocks of block_size characters, and as targets
/// the same block one character later.
///
///     lockstep::data::TextDataset text("kjv.txt", {.block_size = 256});
///     lockstep::data::DataLoader loader(text, {.batch_size = 32, .sampler = &sampler});
///     for (auto& batch : loader) …   // data and target: 32×256 int64
///
/// The file is plain or gzip. It is kept as numbers of one byte for up to 256 characters, two for up to
/// 32768, else four; while it is read its bytes are in memory besides. Immutable after construction: any
/// number of threads may read it; copies share the memory.
class TextDataset {
 public:
  /// Throws c10::Error that names the file when it can't be read, is empty, has fewer characters than
  /// block_size + 1, more than max_bytes, bad UTF-8, or a character that a given vocabulary has not; the
  /// latter two with the position. c10::ValueError for a block_size or stride below 1.
  explicit TextDataset(const std::string& path, const TextDatasetOptions& options = {});

  int64_t size() const;
  /// block_size int64 each. Throws c10::IndexError when the index lies outside [0, size()).
  Example get(int64_t index) const;
  /// B×block_size int64 each. Throws as get() does.
  Example get_batch(std::span<const int64_t> indices) const;

  const TextVocabulary& vocabulary() const { return vocabulary_; }
  int64_t block_size() const { return block_size_; }
  /// The whole text, N uint8, int16 or int32. Not to be written to.
  const at::Tensor& tokens() const { return tokens_; }

 private:
  TextVocabulary vocabulary_ = TextVocabulary::bytes();
  at::Tensor tokens_;
  int64_t block_size_;
  int64_t stride_;
};

}  // namespace lockstep::data

#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/datasets/text_dataset.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::data::text_dataset_test {
namespace {

using lockstep::testing::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kText = "zu Fu\u00df \u2192 \U0001f6b6\n";  // 1, 2, 3 and 4 bytes

struct TextDatasetTest : ::testing::Test {
  testing::TemporaryFolder folder;

  std::string error(const std::string& bytes, const TextDatasetOptions& options = {.block_size = 3}) {
    return message_of<c10::Error>([&] { TextDataset(folder.write("text", bytes), options); });
  }
};

TEST(TextVocabulary, NumbersCharactersInTheOrderOfTheirCodePoints) {
  const auto vocabulary = TextVocabulary::characters_of(kText);
  EXPECT_EQ(vocabulary.characters(), "\n Fuz\u00df\u2192\U0001f6b6");
  EXPECT_EQ(vocabulary.size(), 8);
  EXPECT_TRUE(
      at::equal(vocabulary.encode(kText), torch::tensor({4, 3, 1, 2, 3, 5, 1, 6, 1, 7, 0}, at::kLong)));
  for (const auto dtype : {at::kByte, at::kShort, at::kInt, at::kLong}) {
    EXPECT_EQ(vocabulary.decode(vocabulary.encode(kText).to(dtype)), kText);
  }
  const auto again = TextVocabulary::characters_of(vocabulary.characters());
  EXPECT_TRUE(at::equal(again.encode(kText), vocabulary.encode(kText)));
}

TEST(TextVocabulary, BytesStandForThemselves) {
  const auto vocabulary = TextVocabulary::bytes();
  EXPECT_EQ(vocabulary.size(), 256);
  const std::string all = "\xff\x80" + std::string(1, '\0') + kText;
  EXPECT_EQ(vocabulary.encode(all)[0].item<int64_t>(), 255);
  EXPECT_EQ(vocabulary.decode(vocabulary.encode(all)), all);
}

TEST(TextVocabulary, RefusesWhatItDoesNotKnow) {
  const auto vocabulary = TextVocabulary::characters_of("abc");
  EXPECT_THAT(message_of<c10::ValueError>([&] { vocabulary.encode("ab\u00df"); }),
              AllOf(HasSubstr("'\u00df' at byte 2"), HasSubstr("3 characters")));
  EXPECT_THAT(message_of<c10::ValueError>([&] { vocabulary.encode("abd"); }), HasSubstr("'d' at byte 2"));
  EXPECT_THAT(message_of<c10::IndexError>([&] {
                vocabulary.decode(torch::tensor({0, 3}));
              }),
              HasSubstr("number 3 at position 1"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { vocabulary.decode(torch::tensor({-1})); }),
              HasSubstr("number -1"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { vocabulary.decode(torch::ones({2})); }),
              HasSubstr("N integers"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { vocabulary.decode({}); }), HasSubstr("N integers"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { TextVocabulary::characters_of(""); }), HasSubstr("empty"));
}

TEST(TextVocabulary, RefusesIllFormedUtf8) {
  const std::string bad[] = {"\x80",
                             "\xc0\x80",
                             "\xc1\xbf",
                             "\xc3",
                             "\xc3(",
                             "\xe0\x80\x80",
                             "\xe2\x82",
                             "\xed\xa0\x80",
                             "\xf0\x8f\xbf\xbf",
                             "\xf4\x90\x80\x80",
                             "\xf5\x80\x80\x80",
                             "\xff",
                             "\xe2\x82\x28"};
  for (const std::string& bytes : bad) {
    EXPECT_EQ(message_of<c10::ValueError>([&] { TextVocabulary::characters_of("ab" + bytes); }),
              "byte 2 begins no UTF-8 character");
  }
  for (const char* good : {"\u0080\u07ff", "\u0800\ud7ff\ue000\uffff", "\U00010000\U0010ffff"}) {
    EXPECT_EQ(TextVocabulary::characters_of(good).characters(), good);
  }
}

TEST_F(TextDatasetTest, TargetsAreOneCharacterLater) {
  const TextDataset text(folder.write("text", kText), {.block_size = 4});
  EXPECT_EQ(text.size(), 11 - 4);
  EXPECT_EQ(text.tokens().scalar_type(), at::kByte);
  for (int64_t index = 0; index < text.size(); ++index) {
    const Example example = text.get(index);
    EXPECT_TRUE(at::equal(example.data, text.tokens().slice(0, index, index + 4).to(at::kLong)));
    EXPECT_TRUE(at::equal(example.target, text.tokens().slice(0, index + 1, index + 5).to(at::kLong)));
  }
  const std::vector<int64_t> indices = {6, 0, 6};
  const Example batch = text.get_batch(indices);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 4}));
  EXPECT_TRUE(at::equal(batch.data[0], text.get(6).data));
  EXPECT_TRUE(at::equal(batch.target[1], text.get(0).target));
  EXPECT_EQ(text.vocabulary().decode(text.tokens()), kText);
  EXPECT_THAT(message_of<c10::IndexError>([&] { text.get(7); }), HasSubstr("index 7 is out of range"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { text.get(-1); }), HasSubstr("index -1"));
}

TEST_F(TextDatasetTest, StridesLeaveNoBlockOutThatFits) {
  const std::string letters = "abcdefghijk";  // 11
  const auto sizes = [&](int64_t block_size, int64_t stride) {
    return TextDataset(folder.write("text", letters), {.block_size = block_size, .stride = stride}).size();
  };
  EXPECT_EQ(sizes(5, 5), 2);  // abcdef, fghijk
  EXPECT_EQ(sizes(10, 10), 1);
  EXPECT_EQ(sizes(3, 4), 2);  // abcd, efgh; ijk has no target
  EXPECT_EQ(sizes(2, 4), 3);
  const TextDataset last(folder.path("text"), {.block_size = 2, .stride = 4});
  EXPECT_EQ(last.vocabulary().decode(last.get(2).target), "jk");
}

TEST_F(TextDatasetTest, TakesBytesGivenVocabulariesAndGzip) {
  const TextDataset bytes(folder.write("text", gzip(kText)),
                          {.block_size = 4, .vocabulary = TextVocabulary::bytes()});
  EXPECT_EQ(bytes.tokens().numel(), static_cast<int64_t>(std::string(kText).size()));
  EXPECT_EQ(bytes.vocabulary().decode(bytes.tokens()), kText);
  const TextDataset other(folder.write("text", "Fuzz"),
                          {.block_size = 2, .vocabulary = TextVocabulary::characters_of(kText)});
  EXPECT_TRUE(at::equal(other.get(0).target, torch::tensor({3, 4}, at::kLong)));
}

TEST_F(TextDatasetTest, ManyCharactersTakeMoreMemoryEach) {
  const auto text_of = [](char32_t count) {
    std::string text;
    for (char32_t code_point = 0x10000; code_point < 0x10000 + count; ++code_point) {
      for (const int shift : {18, 12, 6, 0}) {
        text +=
            static_cast<char>(shift == 18 ? 0xf0 | code_point >> 18 : 0x80 | (code_point >> shift & 0x3f));
      }
    }
    return text;
  };
  const std::vector<std::pair<int64_t, at::ScalarType>> cases = {
      {256, at::kByte}, {257, at::kShort}, {32768, at::kShort}, {32769, at::kInt}};
  for (const auto& [count, dtype] : cases) {
    const TextDataset text(folder.write("text", text_of(static_cast<char32_t>(count))), {.block_size = 8});
    EXPECT_EQ(text.tokens().scalar_type(), dtype);
    EXPECT_EQ(text.vocabulary().size(), count);
    EXPECT_EQ(text.get(text.size() - 1).target[7].item<int64_t>(), count - 1);
  }
}

TEST_F(TextDatasetTest, RefusesFilesThatAreNoText) {
  EXPECT_THAT(error(""), AllOf(HasSubstr(folder.path("text")), HasSubstr("is empty")));
  EXPECT_THAT(error("abc"),
              AllOf(HasSubstr(folder.path("text")), HasSubstr("3 characters, which is too short")));
  EXPECT_THAT(error("\u00df\u00df\u00df"), HasSubstr("3 characters"));
  EXPECT_THAT(error("abc\xff\xff"),
              AllOf(HasSubstr(folder.path("text")), HasSubstr("byte 3 begins no UTF-8")));
  EXPECT_THAT(error("abcd", {.block_size = 2, .vocabulary = TextVocabulary::characters_of("abc")}),
              AllOf(HasSubstr(folder.path("text")), HasSubstr("'d' at byte 3")));
  EXPECT_THAT(error("abcd", {.block_size = 2, .max_bytes = 3}), HasSubstr("more than max_bytes = 3"));
  EXPECT_THAT(error(gzip(std::string(100'000, 'x')), {.block_size = 2, .max_bytes = 99'999}),
              HasSubstr("max_bytes"));
  EXPECT_THAT(error("abcd", {.block_size = 0}), HasSubstr("block_size is 0"));
  EXPECT_THAT(error("abcd", {.block_size = 1, .stride = 0}), HasSubstr("stride 0"));
  EXPECT_THAT(message_of<c10::Error>([&] { TextDataset(folder.path("nothing")); }),
              HasSubstr(folder.path("nothing")));
}

TEST_F(TextDatasetTest, FeedsALoader) {
  const TextDataset text(folder.write("text", "abcdefghijklmnopqrstuvwxyz"), {.block_size = 5, .stride = 5});
  DataLoader loader(text, {.batch_size = 2});
  std::string seen;
  for (auto& batch : loader) seen += text.vocabulary().decode(batch.data.flatten());
  EXPECT_EQ(seen, "abcdefghijklmnopqrstuvwxy");
}

}  // namespace
}  // namespace lockstep::data::text_dataset_test

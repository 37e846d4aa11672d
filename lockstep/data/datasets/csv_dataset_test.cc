#include <gtest/gtest.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/datasets/csv_dataset.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

// How files are split into numbers is compared with Python's csv module in csv_dataset_test.py.
namespace lockstep::data::csv_dataset_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kFlowers = "length,width,species\n5.1,3.5,setosa\n7,3.2,versicolor\n5,3.6,setosa\n";

class CsvDatasetTest : public ::testing::Test {
 protected:
  CsvDataset read(const std::string& text, const CsvOptions& options = {}) {
    return CsvDataset(folder_.write("file.csv", text), options);
  }
  /// The error, which must name the file.
  template <class Error = c10::Error>
  std::string error(const std::string& text, const CsvOptions& options = {}) {
    const std::string message = testing::message_of<Error>([&] { read(text, options); });
    EXPECT_THAT(message, HasSubstr(folder_.path("file.csv")));
    return message;
  }

  testing::TemporaryFolder folder_;
};

TEST_F(CsvDatasetTest, GivesFeaturesTargetsAndCategories) {
  const CsvDataset flowers = read(kFlowers, {.target = "species", .categories = {"species"}});
  EXPECT_EQ(flowers.size(), 3);
  EXPECT_EQ(flowers.feature_names(), std::vector<std::string>({"length", "width"}));
  EXPECT_TRUE(
      at::equal(flowers.features(), at::tensor({5.1, 3.5, 7.0, 3.2, 5.0, 3.6}, at::kFloat).view({3, 2})));
  EXPECT_TRUE(at::equal(flowers.targets(), at::tensor({0, 1, 0}, at::kLong)));
  EXPECT_EQ(flowers.categories().at("species"), std::vector<std::string>({"setosa", "versicolor"}));
  const Example second = flowers.get(1);
  EXPECT_EQ(second.data.sizes(), at::IntArrayRef({2}));
  EXPECT_EQ(second.target.item<int64_t>(), 1);
  EXPECT_EQ(second.target.dim(), 0);
}

TEST_F(CsvDatasetTest, FeedsADataLoader) {
  const CsvDataset flowers = read(kFlowers, {.target = "species", .categories = {"species"}});
  DataLoader loader(flowers, {.batch_size = 2});
  std::vector<at::Tensor> features;
  for (const Example& batch : loader) features.push_back(batch.data);
  ASSERT_EQ(features.size(), 2);
  EXPECT_TRUE(at::equal(at::cat(features), flowers.features()));
}

TEST_F(CsvDatasetTest, TakesColumnsByNameOrPositionInTheOrderAskedFor) {
  const CsvDataset data =
      read("a,b,c\n1,2,3\n4,5,6\n", {.features = {"c", int64_t{0}}, .dtype = at::kDouble});
  EXPECT_TRUE(at::equal(data.features(), at::tensor({3, 1, 6, 4}, at::kDouble).view({2, 2})));
  EXPECT_EQ(data.targets().sizes(), at::IntArrayRef({2, 0}));
  const CsvDataset headless =
      read("1;2\n3;4\n", {.target = 0, .target_dtype = at::kLong, .header = false, .delimiter = ';'});
  EXPECT_TRUE(at::equal(headless.targets(), at::tensor({1, 3}, at::kLong)));
  EXPECT_EQ(headless.feature_names(), std::vector<std::string>({"column 1"}));
}

TEST_F(CsvDatasetTest, CategoriesOfTheTrainingDataNumberTheTestData) {
  const CsvDataset train = read(kFlowers, {.target = "species", .categories = {"species"}});
  CsvOptions options{.target = "species", .categories = {"species"}, .known_categories = train.categories()};
  EXPECT_TRUE(
      at::equal(read("length,species\n1,versicolor\n", options).targets(), at::tensor({1}, at::kLong)));
  EXPECT_THAT(
      error("length,species\n1,setosa\n2,rose\n", options),
      AllOf(HasSubstr("row 2 (line 3), column 'species': 'rose' is not among CsvOptions.known_categories")));
}

TEST_F(CsvDatasetTest, AMissingValueIsAnErrorUnlessThereIsAFillValue) {
  const std::string text = "a,b\n1,2\n3,\n5, NA \n";
  EXPECT_THAT(error(text),
              HasSubstr("row 2 (line 3), column 'b': the value is missing; CsvOptions.fill_value"));
  const CsvDataset filled = read(text, {.fill_value = -1, .missing_values = {"NA"}});
  EXPECT_TRUE(at::equal(filled.features(), at::tensor({1, 2, 3, -1, 5, -1}, at::kFloat).view({3, 2})));
  EXPECT_TRUE(
      read(text, {.fill_value = NAN, .missing_values = {"NA"}}).features()[1][1].isnan().item<bool>());
  EXPECT_THAT(
      error(text, {.target = "b", .target_dtype = at::kLong, .fill_value = 0.5, .missing_values = {"NA"}}),
      HasSubstr("is no integer"));
}

TEST_F(CsvDatasetTest, ErrorsNameRowAndColumn) {
  EXPECT_THAT(error("a,b\n1,2\n\n\n3,x1\n"), HasSubstr("row 2 (line 5), column 'b': 'x1' is not a number"));
  EXPECT_THAT(error("a,b\n1,2\n3\n"), HasSubstr("row 2 (line 3): 1 fields, and the first row has 2"));
  EXPECT_THAT(error("a,b\n\"1\n\",2\n3,1 2\n", {.features = {"b"}}), HasSubstr("row 2 (line 4), column 'b'"));
  EXPECT_THAT(error("a,b\n1,2.5\n", {.target = "b", .target_dtype = at::kLong}),
              HasSubstr("an integer of 64 bits"));
  EXPECT_THAT(error("a,b\n1,\"2\"3\n"), HasSubstr("line 2: '3' follows a closing quote"));
  EXPECT_THAT(error("a,b\n1,\"2\n3,4\n"), HasSubstr("line 2: a quote is opened and never closed"));
  EXPECT_THAT(error("a\n\"" + std::string(17 << 20, 'x') + "\"\n"),
              HasSubstr("the row has more than 16 MiB"));
  EXPECT_THAT(error("a\n" + std::string(8 << 20, ',') + "\n"),
              HasSubstr("line 2: the row has more than 8388608 fields"));
}

TEST_F(CsvDatasetTest, ErrorsNameWhatTheOptionsLack) {
  EXPECT_THAT(error("a,b\n1,2\n", {.target = "c"}),
              HasSubstr("there is no column 'c'; the header has 'a', 'b'"));
  EXPECT_THAT(error("a,a\n1,2\n", {.target = "a"}), HasSubstr("column 'a' twice"));
  EXPECT_THAT(error("a,b\n1,2\n", {.target = 2}), HasSubstr("there is no column 2"));
  EXPECT_THAT(error<c10::ValueError>("1,2\n", {.target = "a", .header = false}), HasSubstr("by name"));
  EXPECT_THAT(error<c10::ValueError>("a,b\n1,2\n", {.features = {"a"}, .categories = {"b"}}),
              HasSubstr("neither a feature nor the target"));
  EXPECT_THAT(error("a\n1\n", {.target = "a"}), HasSubstr("no column of features"));
  EXPECT_THAT(error(""), HasSubstr("holds no row"));
  EXPECT_THAT(error("a,b\n"), HasSubstr("no row after the header"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { read("a\n1\n", {.dtype = at::kLong}); }),
              HasSubstr("CsvOptions.dtype is float32 or float64"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { read("a\n1\n", {.delimiter = '"'}); }),
              HasSubstr("two different characters"));
  EXPECT_THAT(testing::message_of<c10::IndexError>([&] { read("a\n1\n").get(1); }),
              HasSubstr("index 1 is out of range for a CsvDataset with 1 rows"));
}

TEST_F(CsvDatasetTest, ADamagedGzipFileIsAnError) {
  const std::string whole = gzip(kFlowers);
  const CsvOptions options{.target = "species", .categories = {"species"}};
  const at::Tensor expected = read(whole, options).features();
  for (size_t length = 0; length < whole.size(); ++length) error(whole.substr(0, length), options);
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    try {
      EXPECT_TRUE(at::equal(read(damaged, options).features(), expected)) << "bit " << bit;
    } catch (const c10::Error&) {
      // as it should
    }
  }
}

TEST_F(CsvDatasetTest, ReadsMoreThanABuffer) {
  std::string text = "number,half\n";
  for (int i = 0; i < 50'000; ++i) text += std::to_string(i) + "," + std::to_string(i / 2.0) + "\r\n";
  for (const std::string& stored : {text, gzip(text)}) {
    const CsvDataset data = read(stored, {.target = "half", .target_dtype = at::kDouble});
    ASSERT_EQ(data.size(), 50'000);
    EXPECT_TRUE(at::equal(data.features().squeeze(1), at::arange(50'000, at::kFloat)));
    EXPECT_TRUE(at::equal(data.targets(), at::arange(50'000, at::kDouble) / 2));
  }
}

}  // namespace
}  // namespace lockstep::data::csv_dataset_test

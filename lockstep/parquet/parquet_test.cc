// What parquet_test.py cannot see from outside: threads, memory in flight, the place of errors, memory that
// is shared. The files are written by Arrow.
#include <algorithm>
#include <arrow/array.h>
#include <arrow/builder.h>
#include <arrow/io/file.h>
#include <arrow/table.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <memory>
#include <numeric>
#include <parquet/arrow/writer.h>
#include <thread>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/parquet/parquet_batches.h>
#include <lockstep/parquet/parquet_rows.h>
#include <lockstep/parquet/row_group_collate.h>
#include <lockstep/testing/folder_test.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/told_phases.h>

namespace lockstep::data::parquet_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

using Rows = std::vector<int64_t>;

class ParquetTest : public testing::FolderTest {
 protected:
  /// Row i of column "id" is i, of "name" the number in words of one letter: 3 is "xxx".
  std::string write(const std::string& name, int64_t rows, int64_t rows_per_group) {
    arrow::Int64Builder ids;
    arrow::StringBuilder names;
    for (int64_t i = 0; i < rows; ++i) {
      EXPECT_TRUE(ids.Append(i).ok());
      EXPECT_TRUE(names.Append(std::string(static_cast<size_t>(i % 5), 'x')).ok());
    }
    const auto schema =
        arrow::schema({arrow::field("id", arrow::int64()), arrow::field("name", arrow::utf8())});
    const auto table = arrow::Table::Make(schema, {*ids.Finish(), *names.Finish()});
    const auto path = (folder_ / name).string();
    const auto file = *arrow::io::FileOutputStream::Open(path);
    const auto properties = parquet::WriterProperties::Builder()
                                .compression(parquet::Compression::SNAPPY)
                                ->disable_dictionary()
                                ->build();
    EXPECT_TRUE(
        parquet::arrow::WriteTable(*table, arrow::default_memory_pool(), file, rows_per_group, properties)
            .ok());
    EXPECT_TRUE(file->Close().ok());
    return path;
  }
};

Rows ids_of(const Table& table) {
  const auto& ids = table.tensor("id");
  return {ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + ids.numel()};
}

Rows all_of(ParquetBatches& batches) {
  Rows seen;
  for (const auto& batch : batches) {
    const auto ids = ids_of(batch);
    seen.insert(seen.end(), ids.begin(), ids.end());
  }
  return seen;
}

Rows range(int64_t rows) {
  Rows all(static_cast<size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

RowGroupSampler alone(const ParquetDataset& dataset, bool shuffle = true) {
  return RowGroupSampler(dataset, {.num_replicas = 1, .rank = 0, .shuffle = shuffle});
}

TEST_F(ParquetTest, NumbersAreArrowsMemoryAndOutliveTheDataSet) {
  Table kept;
  {
    const ParquetDataset dataset(write("a.parquet", 100, 100));
    kept = dataset.get(0);
  }
  EXPECT_EQ(ids_of(kept), range(100));
  EXPECT_EQ(kept["name"].string(13), "xxx");
  const Table part = kept.slice(10, 20);
  EXPECT_EQ(part.tensor("id").const_data_ptr(), kept.tensor("id").const_data_ptr<int64_t>() + 10);
  EXPECT_EQ(part["name"].string(3), "xxx");
  EXPECT_NE(part.clone().tensor("id").const_data_ptr(), part.tensor("id").const_data_ptr());
  const auto matrix = kept.matrix({"id", "id"});
  EXPECT_EQ(matrix.sizes(), (std::vector<int64_t>{100, 2}));
  EXPECT_EQ(matrix[7][1].item<float>(), 7);
}

TEST_F(ParquetTest, ExpectedBytesAreThoseThatItTakes) {
  const ParquetDataset dataset(write("a.parquet", 1000, 300));
  for (int64_t group = 0; group < dataset.size(); ++group) {
    EXPECT_EQ(dataset.expected_bytes(group), dataset.get(group).nbytes()) << group;
  }
}

TEST_F(ParquetTest, ReadsAheadWithinTheLimit) {
  const ParquetDataset dataset(write("a.parquet", 1000, 100));
  const int64_t bytes = dataset.get(0).nbytes();  // as many in each of the ten
  for (const bool shuffle : {false, true}) {
    auto sampler = alone(dataset, shuffle);
    for (const int64_t groups : {1, 2, 3, 20}) {
      ParquetBatches batches(
          dataset, {.batch_size = 7, .sampler = &sampler, .memory_limit = groups * bytes + bytes / 2});
      const int64_t most = std::min<int64_t>(groups, dataset.size()) * bytes;
      Rows seen;
      for (const Table& batch : batches) {
        // The reader gets as far as it may, however slow it is.
        while (seen.empty() && batches.bytes_in_flight() < most) std::this_thread::yield();
        const auto ids = ids_of(batch);
        seen.insert(seen.end(), ids.begin(), ids.end());
      }
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, range(1000));
      EXPECT_EQ(batches.peak_bytes_in_flight(), most) << groups;
      EXPECT_EQ(batches.bytes_in_flight(), 0);
    }
  }
}

TEST_F(ParquetTest, ReadsARowGroupLargerThanTheLimitAlone) {
  const ParquetDataset dataset(write("a.parquet", 1000, 100));
  ParquetBatches batches(dataset, {.batch_size = 64, .memory_limit = 1});
  EXPECT_EQ(all_of(batches), range(1000));
  EXPECT_LE(batches.peak_bytes_in_flight(), dataset.expected_bytes(0) + 100);
  EXPECT_GT(batches.peak_bytes_in_flight(), 0);
}

TEST_F(ParquetTest, LeavingTheLoopEarlyLeavesNothingBehind) {
  const ParquetDataset dataset(write("a.parquet", 1000, 50));
  ParquetBatches batches(dataset, {.batch_size = 8});
  for (int i = 0; i < 20; ++i) {
    for (auto& batch : batches) {
      if (ids_of(batch).front() >= 8 * i) break;
    }
    EXPECT_EQ(batches.bytes_in_flight(), 0);
  }
  EXPECT_EQ(all_of(batches), range(1000));
}

TEST_F(ParquetTest, BatchesTellOfStepsAndPhases) {
  static int64_t marks = 0;
  const testing::ToldPhases told;
  step_mark_listener = [](StepMark mark, const void* /*source*/) {
    marks += mark == StepMark::kBatch ? 1 : 0;
  };
  ParquetBatches batches(ParquetDataset(write("a.parquet", 30, 7)), {.batch_size = 10});
  const auto samples_before = told.board().samples.load();
  int64_t count = 0;
  for (const Table& batch : batches) {
    EXPECT_EQ(marks, ++count);
    EXPECT_EQ(told.phase(), TrainingPhase::kForward);
    EXPECT_EQ(told.board().samples, samples_before + 10 * count);
    EXPECT_EQ(batch.rows(), 10);
  }
  EXPECT_EQ(marks, 3) << "and none for the end";
  step_mark_listener = nullptr;
}

TEST_F(ParquetTest, TwoEpochsAtOnceAndIteratorsThatOutliveTheirBatches) {
  auto batches = std::make_unique<ParquetBatches>(ParquetDataset(write("a.parquet", 30, 7)),
                                                  ParquetBatchesOptions{.batch_size = 10});
  auto first = batches->begin();
  auto second = batches->begin();
  ++second;
  batches.reset();
  EXPECT_THAT(ids_of(*first), range(10));
  EXPECT_EQ(ids_of(*second).front(), 10);
  ++first, ++second;
  EXPECT_EQ(ids_of(*first), (Rows{10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
  ++second;
  EXPECT_TRUE(second == std::default_sentinel);
}

TEST_F(ParquetTest, AnErrorComesAfterTheBatchesBeforeIt) {
  const auto path = write("a.parquet", 1000, 500);
  {
    // The second row group's first column is in the second half of the file.
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path));
    file.seekp(size / 2);
    file << std::string(200, '\xff');
  }
  const ParquetDataset dataset(path);
  for (const bool read_ahead : {false, true}) {
    ParquetBatches batches(dataset, {.batch_size = 100, .read_ahead = read_ahead});
    Rows seen;
    const auto message = message_of<c10::Error>([&] {
      for (auto& batch : batches) seen.push_back(ids_of(batch).front());
    });
    EXPECT_THAT(seen, ElementsAre(0, 100, 200, 300, 400));
    EXPECT_THAT(message, AllOf(HasSubstr("row group 1 of " + path), HasSubstr("cannot read")));
    EXPECT_EQ(batches.bytes_in_flight(), 0);
  }
}

TEST_F(ParquetTest, AFileThatChangesIsRefused) {
  const auto path = write("a.parquet", 100, 50);
  const ParquetDataset dataset(path);
  write("a.parquet", 200, 50);
  EXPECT_THAT(message_of<c10::Error>([&] { dataset.get(0); }), AllOf(HasSubstr(path), HasSubstr("had")));
  std::filesystem::remove(path);
  EXPECT_THAT(message_of<c10::Error>([&] { dataset.get(0); }), HasSubstr(path));
}

TEST_F(ParquetTest, ManyThreadsMayRead) {
  const ParquetDataset dataset(write("a.parquet", 400, 100));
  const ParquetRows rows(dataset, {.memory_limit = dataset.expected_bytes(0) * 2 + 100});
  std::vector<std::thread> threads;
  std::vector<int> right(4);
  for (size_t t = 0; t < right.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 20; ++i) {
        const Rows wanted{399 - i, i, 150 + static_cast<int64_t>(t), i};
        if (ids_of(rows.get_batch(wanted)) == wanted && ids_of(dataset.get(1)).front() == 100) ++right[t];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(right, ElementsAre(20, 20, 20, 20));
  EXPECT_LE(rows.cached_bytes(), dataset.expected_bytes(0) * 2 + 100);
  EXPECT_GT(rows.cached_bytes(), 0);
}

TEST_F(ParquetTest, RowsAreADataSetForAnySampler) {
  const ParquetRows rows{ParquetDataset(write("a.parquet", 103, 20))};
  DistributedSampler sampler(rows.size(), 2, 1, true, 5);
  DataLoader loader(rows, {.batch_size = 10, .sampler = &sampler, .num_workers = 1});
  Rows seen;
  for (auto& batch : loader) {
    const auto ids = ids_of(batch);
    seen.insert(seen.end(), ids.begin(), ids.end());
  }
  EXPECT_EQ(seen, sampler.indices());
  EXPECT_EQ(ids_of(rows.get(102)), Rows{102});
}

TEST_F(ParquetTest, ALoaderCollatesRowGroupsToBatches) {
  const ParquetDataset dataset(write("a.parquet", 100, 16));
  auto sampler = alone(dataset);
  DataLoader loader(dataset, {.batch_size = 3, .sampler = &sampler, .num_workers = 1},
                    RowGroupCollate({.batch_size = 20, .sampler = &sampler}));
  std::vector<Rows> epochs;
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    Rows seen;
    size_t mixed = 0;
    for (const auto& batches : loader) {
      for (const Table& batch : batches) {
        const auto ids = ids_of(batch);
        EXPECT_LE(ids.size(), 20U);
        if (batch.row_group() == -1) ++mixed;
        seen.insert(seen.end(), ids.begin(), ids.end());
      }
    }
    EXPECT_GE(mixed, 4U);
    epochs.push_back(seen);
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, range(100));
  }
  EXPECT_NE(epochs[0], epochs[1]);
}

TEST_F(ParquetTest, RefusesWhatItCannotDo) {
  const ParquetDataset dataset(write("a.parquet", 100, 16));
  const auto batches = [&](const ParquetBatchesOptions& options) {
    return message_of<c10::ValueError>([&] { ParquetBatches(dataset, options); });
  };
  EXPECT_THAT(batches({.batch_size = 0}), HasSubstr("batch_size should be a positive integer, but is 0"));
  EXPECT_THAT(batches({.memory_limit = 0}), HasSubstr("memory_limit"));
  EXPECT_THAT(batches({.even_batches = true}), HasSubstr("needs a sampler"));
  EXPECT_THAT(message_of<c10::ValueError>([] { RowGroupCollate({.batch_size = -1}); }), HasSubstr("-1"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { dataset.get(7); }), HasSubstr("row group 7 is out of range"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { ParquetRows(dataset).get(100); }), HasSubstr("row 100"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { ParquetRows(dataset, {.memory_limit = -1}); }),
              HasSubstr("-1"));
  const Table table = dataset.get(0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { table.tensor("nome"); }),
              HasSubstr("no column 'nome'; the columns are 'id', 'name'"));
  EXPECT_THAT(message_of<c10::TypeError>([&] { table.tensor("name"); }), HasSubstr("holds strings"));
  EXPECT_THAT(message_of<c10::TypeError>([&] { table["id"].string(0); }), HasSubstr("not strings"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { table["name"].string(16); }), HasSubstr("row 16"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { table.slice(3, 17); }), HasSubstr("3 to 17"));

  RowGroupSampler sampler(dataset, {.num_replicas = 8, .rank = 0});
  ParquetBatches even(dataset, {.sampler = &sampler, .even_batches = true});
  EXPECT_THAT(message_of<c10::ValueError>([&] { even.begin(); }),
              AllOf(HasSubstr("7 row groups are too few"), HasSubstr("8 ranks")));
}

TEST_F(ParquetTest, FoldersHoldTheFilesThatEndInParquet) {
  write("b.parquet", 3, 3);
  write("a.parquet", 2, 2);
  write("_metadata.parquet", 9, 9);
  std::ofstream(folder_ / "notes.txt") << "not Parquet";
  const ParquetDataset dataset(folder_.string());
  EXPECT_THAT(dataset.row_counts(), ElementsAre(2, 3));
  EXPECT_THAT(dataset.describe(1), HasSubstr("row group 0 of " + (folder_ / "b.parquet").string()));
  const ParquetDataset listed({(folder_ / "b.parquet").string(), (folder_ / "a.parquet").string()});
  EXPECT_THAT(listed.row_counts(), ElementsAre(3, 2));
  std::filesystem::create_directory(folder_ / "empty");
  EXPECT_THAT(message_of<c10::Error>([&] { ParquetDataset((folder_ / "empty").string()); }),
              HasSubstr("holds no *.parquet file"));
}

}  // namespace
}  // namespace lockstep::data::parquet_test

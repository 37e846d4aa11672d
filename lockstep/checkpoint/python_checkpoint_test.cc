// torch.save's files as bytes: what is damaged, hostile or can't be written. What Python makes of them:
// python_checkpoint_test.py.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <iterator>
#include <map>
#include <random>
#include <sys/resource.h>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/testing/folder_test.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::python_checkpoint_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

class PythonCheckpoint : public testing::FolderTest {
 protected:
  std::string bytes_of(const StateDict& state) const {
    save_python_checkpoint(state, folder_ / "bytes.pt");
    return testing::content_of(folder_ / "bytes.pt");
  }
};

StateDict example() {
  return {{"weight", at::arange(20, at::kFloat).view({4, 5}).t()},
          {"flags", at::ones({3}, at::kBool)},
          {"epoch", 7},
          {"loss", 0.25},
          {"inner", to_object(StateDict{{"name", "text"}, {"step", at::scalar_tensor(3)}})}};
}

/// Reads the bytes, and compares with what was written if they can be read. Returns whether they could.
bool reads_the_same(const std::string& bytes, const std::string& expected) {
  try {
    EXPECT_EQ(pickle_object(parse_python_object(bytes)), expected);
    return true;
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("torch.save's bytes"));
    return false;
  }
}

TEST_F(PythonCheckpoint, DamageNeverGoesUnnoticed) {
  const std::string bytes = bytes_of(example());
  const std::string expected = pickle_object(parse_python_object(bytes));
  std::mt19937 random(3);
  int noticed = 0;
  for (int time = 0; time < 1500; ++time) {
    std::string damaged = bytes;
    const size_t place = random() % bytes.size();
    damaged[place] = static_cast<char>(damaged[place] ^ (1 << random() % 8));
    noticed += reads_the_same(damaged, expected) ? 0 : 1;
  }
  EXPECT_GT(noticed, 300) << "the rest is padding, and what is not read";
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(reads_the_same(bytes.substr(0, length), expected)) << length;
  }
  for (int time = 0; time < 500; ++time) {  // several bytes at once: sizes and offsets change together
    std::string damaged = bytes;
    for (int i = 0; i < 8; ++i) {
      const size_t place = bytes.size() - 1 - random() % std::min<size_t>(bytes.size(), 1200);
      damaged[place] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
    }
    reads_the_same(damaged, expected);
  }
}

TEST_F(PythonCheckpoint, EachTensorsDamageIsNamed) {
  std::string bytes = bytes_of({{"weight", at::full({100}, 7.5F)}});
  const float value = 7.5F;
  const size_t place = bytes.find(std::string(reinterpret_cast<const char*>(&value), 4) +
                                  std::string(reinterpret_cast<const char*>(&value), 4));
  ASSERT_NE(place, std::string::npos);
  bytes[place + 40] ^= 1;
  EXPECT_THAT(message_of<CheckpointError>([&] { parse_python_object(bytes, "net.pt"); }),
              HasSubstr("net.pt is damaged: the checksum of 'archive/data/0' is wrong"));
}

TEST_F(PythonCheckpoint, OtherTopLevelsAreRead) {
  save_python_object(to_object(std::vector<int64_t>{1, 2}), folder_ / "list.pt");
  EXPECT_EQ(load_python_object(folder_ / "list.pt").toListRef().size(), 2U);
  EXPECT_THAT(message_of<CheckpointError>([&] { load_python_checkpoint(folder_ / "list.pt"); }),
              HasSubstr("holds no dict"));
  save_python_object(to_object(std::map<int64_t, int64_t>{{1, 2}}), folder_ / "numbers.pt");
  EXPECT_THAT(message_of<CheckpointError>([&] { load_python_checkpoint(folder_ / "numbers.pt"); }),
              HasSubstr("keys that are no strings"));
  EXPECT_THAT(message_of<CheckpointError>([&] { load_python_object(folder_); }),
              HasSubstr("no regular file"));
}

TEST_F(PythonCheckpoint, WhatCannotBeWrittenLeavesTheOldFile) {
  const auto path = folder_ / "net.pt";
  save_python_checkpoint(example(), path);
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                save_python_checkpoint({{"a", at::eye(2).to_sparse()}}, path);
              }),
              HasSubstr("[\"a\"] is a sparse"));
  EXPECT_THAT(
      message_of<CheckpointError>([&] { save_python_checkpoint(example(), folder_ / "no" / "net.pt"); }),
      HasSubstr("No such file or directory"));

  // A file system without space.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  for (const rlim_t most : {rlim_t{0}, rlim_t{100}, rlim_t{5000}, rlim_t{100000}}) {
    const rlimit limit{most, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    std::string text;
    try {
      save_python_checkpoint({{"large", at::ones({100000})}}, path);
    } catch (const CheckpointError& error) {
      text = error.what_without_backtrace();
    }
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_THAT(text, HasSubstr("File too large")) << most;
  }
  EXPECT_EQ(load_python_checkpoint(path).size(), 5U);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1)
      << "a temporary file is left over";
}

TEST_F(PythonCheckpoint, WhatKilledProcessesLeftIsRemoved) {
  const auto now = std::filesystem::file_time_type::clock::now();
  const std::map<std::string, std::chrono::hours> ages{
      {"net.pt.tmp-0123456789abcdef", std::chrono::hours(2)},
      {"net.pt.tmp-0123456789abcdee", std::chrono::hours(0)},
      {"net.pt.tmp-0123456789abcdeg", std::chrono::hours(2)},
      {"old.pt.tmp-0123456789abcdef", std::chrono::hours(2)}};
  for (const auto& [name, age] : ages) {
    std::ofstream(folder_ / name) << "part";
    std::filesystem::last_write_time(folder_ / name, now - age);
  }
  save_python_checkpoint(example(), folder_ / "net.pt");
  for (const auto& [name, age] : ages) {
    EXPECT_EQ(std::filesystem::exists(folder_ / name), name != "net.pt.tmp-0123456789abcdef") << name;
  }
}

}  // namespace
}  // namespace lockstep::python_checkpoint_test

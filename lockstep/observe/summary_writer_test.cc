#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <gmock/gmock.h>
#include <limits>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/process/end_hook.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/observe/internal/event_queue.h>
#include <lockstep/observe/summary_writer.h>
#include <lockstep/testing/folder_test.h>
#include <lockstep/testing/message_of.h>

// What stands in the files is observe_test.py's subject.
namespace lockstep::summary_writer_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

class SummaryWriterTest : public testing::FolderTest {
 protected:
  ~SummaryWriterTest() override { clear_world_defaults(); }

  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
      if (entry.is_regular_file()) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  /// How many records the files have; their lengths must lead to the end of each.
  int64_t records() const {
    int64_t count = 0;
    for (const auto& path : files()) {
      const std::string bytes = testing::content_of(path);
      for (size_t at = 0; at < bytes.size(); ++count) {
        uint64_t length = 0;
        std::memcpy(&length, bytes.data() + at, sizeof length);
        at += 16 + length;
        if (at > bytes.size()) ADD_FAILURE() << path << " ends in the middle of a record";
      }
    }
    return count;
  }
};

TEST(EventRecord, HasTheChecksumsOfTensorFlow) {
  std::string record;
  observe::internal::append_record(record, "123456789");
  ASSERT_EQ(record.size(), 8 + 4 + 9 + 4U);
  uint32_t masked = 0;
  std::memcpy(&masked, record.data() + 21, 4);
  // RFC 3720 B.4's check value, 0xe3069283, masked.
  EXPECT_EQ(masked, ((0xe3069283U >> 15) | (0xe3069283U << 17)) + 0xa282ead8U);
}

TEST_F(SummaryWriterTest, TheDefaultFolderNamesDateAndHost) {
  const SummaryWriter writer({}, {.comment = "_lr0.1"});
  EXPECT_THAT(writer.get_logdir().string(),
              ::testing::MatchesRegex("runs/[A-Z][a-z][a-z][0-9]+_[0-9]+-[0-9]+-[0-9]+_.+_lr0.1"));
  EXPECT_FALSE(std::filesystem::exists(writer.get_logdir())) << "nothing was logged";
}

TEST_F(SummaryWriterTest, FlushedEventsAreInTheFileAndCloseBeginsAnotherOne) {
  SummaryWriter writer(folder_ / "run");
  for (int64_t step = 0; step < 100; ++step) writer.add_scalar("loss", 1, step);
  writer.flush();
  EXPECT_EQ(records(), 101) << "and the version";
  writer.close();
  writer.close();
  EXPECT_EQ(files().size(), 1U);
  writer.add_scalar("loss", 1, 100);
  writer.flush();
  EXPECT_EQ(files().size(), 2U);
  EXPECT_EQ(records(), 103);
  EXPECT_EQ(writer.lost(), 0);
}

TEST_F(SummaryWriterTest, ManyThreadsAndAShortQueueLoseNothing) {
  {
    SummaryWriter writer(folder_, {.max_queue = 2, .flush_secs = 0.001});
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int64_t step = 0; step < 500; ++step) writer.add_scalars("a", {{"b", 1}, {"c", 2}}, step);
        writer.flush();
      });
    }
  }
  EXPECT_EQ(records(), 2 * (4 * 500 + 1));
}

TEST_F(SummaryWriterTest, OnlyRankZeroWrites) {
  set_world_defaults({.rank = 1, .world_size = 2});
  SummaryWriter silent(folder_ / "silent");
  silent.add_scalar("loss", 1, 1);
  silent.add_scalar("loss", at::ones({1}), 1);
  silent.add_scalars("loss", {{"a", 1}});
  silent.add_histogram("loss", at::ones({3}));
  silent.add_histogram_raw("loss", 0, 1, 2, 3, 4, {1}, {2});
  silent.add_image("loss", at::ones({3, 4, 5}));
  silent.add_text("loss", "low");
  silent.add_hparams({{"lr", 0.1}}, {});
  silent.log_hyperparameters({{"lr", 0.1}});
  silent.resume(3);
  silent.flush();
  silent.finalize("finished");
  EXPECT_TRUE(files().empty());
  SummaryWriter told(folder_ / "rank1", {.writes = true});
  told.add_scalar("loss", 1, 1);
  told.close();
  EXPECT_EQ(files().size(), 1U);
}

TEST_F(SummaryWriterTest, AForkedChildWritesNothing) {
  auto writer = std::make_unique<SummaryWriter>(folder_);
  writer->add_scalar("loss", 1, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    writer->add_scalar("loss", 2, 2);
    writer->flush();
    writer->close();
    const bool none_lost = writer->lost() == 0;
    writer.reset();  // where the thread, which is the parent's, would be waited for
    std::_Exit(none_lost ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  writer->close();
  EXPECT_EQ(records(), 2);
}

TEST_F(SummaryWriterTest, ASignalThatEndsTheProcessIsToldToWhoCameLater) {
  static std::array<int, 2> told;  // a pipe, which a signal handler may write to
#if defined(__SANITIZE_ADDRESS__)
  const std::vector<int> signals{SIGTERM};  // its own handler of SIGSEGV exits
#else
  const std::vector<int> signals{SIGSEGV, SIGTERM};
#endif
  for (const int signal : signals) {
    ASSERT_EQ(::pipe(told.data()), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      SummaryWriter writer(folder_);
      writer.add_scalar("loss", 1, 1);
      before_default_end = [](int number) {
        [[maybe_unused]] const ssize_t written = ::write(told[1], &number, sizeof number);
      };
      std::raise(signal);
      std::_Exit(1);
    }
    ::close(told[1]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    int number = 0;
    EXPECT_EQ(::read(told[0], &number, sizeof number), static_cast<ssize_t>(sizeof number));
    EXPECT_EQ(number, signal);
    ::close(told[0]);
  }
}

TEST_F(SummaryWriterTest, TakesMoreThanMayWaitAndAnEndlessInterval) {
  SummaryWriter writer(folder_, {.flush_secs = std::numeric_limits<double>::infinity()});
  const std::string text(size_t{20} << 20, 'x');
  for (int64_t step = 0; step < 5; ++step) writer.add_text("long", text, step);
  writer.close();
  EXPECT_EQ(records(), 6);
}

TEST_F(SummaryWriterTest, RefusesWhatMakesNoSense) {
  SummaryWriter writer(folder_);
  const auto values = at::ones({2, 3});
  const auto nan = at::full({2}, std::nan(""));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_scalar("x", values); }),
              StartsWith("Tensor should contain one element (0 dimensions). Was given size: 6 and 2"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_histogram("x", at::ones({0})); }),
              StartsWith("The input has no element."));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_histogram("x", values, 1, "fd"); }),
              HasSubstr("'fd'; it takes \"tensorflow\""));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_histogram("x", values, 1, int64_t{0}); }),
              HasSubstr("`bins` is 0"));
  EXPECT_THAT(
      message_of<c10::ValueError>([&] { writer.add_histogram("x", values, 1, std::vector<double>{1}); }),
      HasSubstr("at least two edges"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_histogram("x", nan); }),
              HasSubstr("none of 2 values"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_histogram("x", nan, 1, int64_t{5}); }),
              HasSubstr("nan] is not finite"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_histogram_raw("x", 0, 1, 1, 1, 1, {1}, {}); }),
              HasSubstr("1 bucket_limits, but 0"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_image("x", values); }),
              HasSubstr("tensor shape: [2, 3], input_format: CHW"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_image("x", values, 1, std::nullopt, "HH"); }),
              HasSubstr("dimension shorthand twice"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { writer.add_image("x", values, 1, std::nullopt, "HX"); }),
              HasSubstr("has no W"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                writer.add_image("x", at::ones({5, 2, 2}));
              }),
              HasSubstr("has 5 channels"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                writer.add_image("x", at::ones({3, 0, 2}));
              }),
              HasSubstr("no pixels"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                writer.add_images("x", at::ones({2, 4, 2, 2}));
              }),
              HasSubstr("have 4 channels; a grid takes 1 or 3"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                writer.add_hparams({{"lr", 0.1}}, {}, {{"momentum", {0.9}}});
              }),
              HasSubstr("hparam_domain_discrete[momentum]"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                writer.add_hparams({{"lr", 0.1}}, {}, {{"lr", {true}}});
              }),
              HasSubstr("hparam_domain_discrete[lr]"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { SummaryWriter({}, {.max_queue = 0}); }),
              HasSubstr("max_queue is 0"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { SummaryWriter({}, {.flush_secs = 0}); }),
              HasSubstr("flush_secs is 0"));
}

}  // namespace
}  // namespace lockstep::summary_writer_test

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <set>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/flight/internal/record_directory.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/flight/records.h>
#include <lockstep/flight/testing/record_folder.h>
#include <lockstep/testing/multi_rank.h>

// The recorder and its files. Each test has a process of its own, because there is one recorder for each.
namespace lockstep::flight::recorder_test {

using internal::record_directory;
using internal::write_record;

namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_ranks;
using testing::run_ranks_collect;

const auto kGroup = std::make_shared<const ObservedGroup>(ObservedGroup{"default", {0, 1}, 0});

uint64_t record(uint64_t sequence, const std::vector<at::Tensor>& inputs = {}) {
  ObservedOperation operation;
  operation.kind = "all_reduce";
  operation.sequence = sequence;
  operation.detail = "SUM";
  operation.inputs = &inputs;
  operation.timeout = 7s;
  operation.where = std::source_location::current();
  if (sequence == 1) operation.purpose = "the first test";
  return scheduled(kGroup, operation);
}

/// The body in a process of its own.
void alone(const std::function<void()>& body,
           std::vector<std::pair<std::string, std::optional<std::string>>> environment = {}) {
  run_ranks(1, [&](int) { body(); }, {.environment = std::move(environment)});
}

TEST(FlightRecorder, WritesWhatItWasToldAndTheReaderReadsIt) {
  alone([] {
    RecordFolder folder;
    set_world_defaults({.rank = 1, .world_size = 3});
    const auto group = std::make_shared<const ObservedGroup>(ObservedGroup{"pair", {2, 1}, 1, "group/7"});
    completed(record(1, {at::ones({2, 3}), at::ones({}, at::kLong)}));
    failed(record(2), "peer \"2\" died\n\xff");
    const std::vector<at::Tensor> buffer{at::ones({5}, at::kBFloat16)};
    ObservedOperation message;
    message.kind = "recv";
    message.sequence = 1;
    message.point_to_point = true;
    message.peer = 0;
    message.tag = 9;
    message.outputs = &buffer;
    message.asynchronous = true;
    started(scheduled(group, message));
    const std::string path = dump("timeout");
    EXPECT_EQ(path, folder.path("rank_1.json"));
    EXPECT_THAT(folder.entries(), ElementsAre("rank_1.json"));

    const RankRecord read = read_file(path);
    EXPECT_EQ(read.rank, 1);
    EXPECT_EQ(read.world_size, 3);
    EXPECT_EQ(read.pid, ::getpid());
    EXPECT_EQ(read.reason, "timeout");
    EXPECT_THAT(read.groups, ElementsAre(GroupRecord{"default", "default", {0, 1}},
                                         GroupRecord{"group/7", "pair", {2, 1}}));
    ASSERT_EQ(read.entries.size(), 3U);
    const Entry& first = read.entries[0];
    EXPECT_EQ(first.operation, "all_reduce");
    EXPECT_EQ(first.detail, "SUM");
    EXPECT_EQ(first.sequence, 1U);
    EXPECT_EQ(first.state, State::kCompleted);
    EXPECT_THAT(first.inputs.sizes, ElementsAre(ElementsAre(2, 3), IsEmpty()));
    EXPECT_THAT(first.inputs.dtypes, ElementsAre("Float", "Long"));
    EXPECT_EQ(first.timeout_ms, 7000);
    EXPECT_THAT(first.file, HasSubstr("recorder_test.cc"));
    EXPECT_GT(first.line, 0);
    EXPECT_EQ(first.purpose, "the first test");
    EXPECT_EQ(read.entries[1].purpose, "");
    EXPECT_LE(first.created_ns, first.ended_ns);
    EXPECT_LE(first.ended_ns, read.monotonic_ns);
    EXPECT_EQ(read.entries[1].state, State::kFailed);
    EXPECT_THAT(read.entries[1].error, HasSubstr("peer \"2\" died\n"));
    const Entry& third = read.entries[2];
    EXPECT_TRUE(third.point_to_point && third.asynchronous && third.pending());
    EXPECT_EQ(third.group, 1);
    EXPECT_EQ(third.peer, 0);
    EXPECT_EQ(third.tag, 9);
    EXPECT_THAT(third.outputs.dtypes, ElementsAre("BFloat16"));
    EXPECT_GE(third.started_ns, third.created_ns);
    EXPECT_EQ(third.ended_ns, 0);
  });
}

TEST(FlightRecorder, KeepsTheLastOperationsAndIgnoresTheIdsOfOthers) {
  for (const char* variable : {"LOCKSTEP_FLIGHT_RECORDS", "TORCH_FR_BUFFER_SIZE"}) {
    alone(
        [] {
          RecordFolder folder;
          std::vector<uint64_t> ids;
          for (uint64_t i = 1; i <= 7; ++i) ids.push_back(record(i));
          failed(ids[1], "long gone");  // its place is taken
          completed(ids[5]);
          failed(ids[5], "twice");  // the first end counts
          const RankRecord read = read_file(dump("test"));
          EXPECT_EQ(read.overwritten, 4U);
          ASSERT_EQ(read.entries.size(), 3U);
          EXPECT_EQ(read.entries[0].sequence, 5U);
          EXPECT_EQ(read.entries[0].state, State::kScheduled);
          EXPECT_EQ(read.entries[1].state, State::kCompleted);
          EXPECT_EQ(read.entries[1].error, "");
        },
        {{variable, "3"}});
  }
}

TEST(FlightRecorder, CanBeSwitchedOff) {
  alone(
      [] {
        RecordFolder folder;
        watch_signal();
        EXPECT_EQ(record(1), 0U);
        failed(0, "no record");
        EXPECT_EQ(dump("test"), "");
        EXPECT_THAT(folder.entries(), IsEmpty());
      },
      {{"LOCKSTEP_FLIGHT_RECORDS", "0"}});
}

TEST(FlightRecorder, NamesAVariableThatIsMalformed) {
  for (const char* variable : {"LOCKSTEP_FLIGHT_RECORDS", "LOCKSTEP_FLIGHT_SIGNAL"}) {
    alone(
        [variable] {
          try {
            watch_signal();
            FAIL() << "should have thrown";
          } catch (const c10::ValueError& error) {
            EXPECT_THAT(error.what(), AllOf(HasSubstr(variable), HasSubstr("many")));
          }
        },
        {{variable, "many"}});
  }
}

TEST(FlightRecorder, KeepsManyTensorsAndOddOnes) {
  alone([] {
    RecordFolder folder;
    record(1, std::vector<at::Tensor>(200, at::ones({1, 2, 3})));
    record(2, {at::Tensor(), at::ones({2}).to_sparse(), at::ones(std::vector<int64_t>(40, 1))});
    const RankRecord read = read_file(dump("test"));
    EXPECT_EQ(read.entries[0].inputs.sizes.size(), 64U);
    ASSERT_EQ(read.entries[1].inputs.sizes.size(), 2U);
    EXPECT_EQ(read.entries[1].inputs.sizes[1].size(), 40U);
  });
}

TEST(FlightRecorder, WritesOnlyWhenSomethingChangedAndNotTooOften) {
  alone([] {
    RecordFolder folder;
    record(1);
    const auto file = dump("first");
    const auto begin = std::chrono::steady_clock::now();
    const auto identity = [&] {
      struct stat status {};
      EXPECT_EQ(::stat(file.c_str(), &status), 0);
      return std::pair(status.st_ino, status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec);
    };
    const auto before = identity();
    EXPECT_EQ(dump("again"), file);
    EXPECT_EQ(identity(), before) << "written although nothing changed";

    std::set<std::pair<ino_t, int64_t>> versions;
    for (uint64_t i = 2; i < 200; ++i) {
      failed(record(i), "the group has failed");
      EXPECT_EQ(dump("failure"), file);
      versions.insert(identity());
    }
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_GE(versions.size(), 2U);
    EXPECT_LE(static_cast<double>(versions.size()), 5 + 4 * seconds);
    EXPECT_EQ(read_file(file).reason, "first, failure");
  });
}

TEST(FlightRecorder, ForgetsTheOperationsOfAnEarlierWorld) {
  alone([] {
    RecordFolder folder;
    set_world_defaults({.rank = 1, .world_size = 2});
    watch_signal();
    record(1);
    unwatch_signal();
    set_world_defaults({.rank = 0, .world_size = 1});
    watch_signal();
    EXPECT_THAT(read_file(dump("test")).entries, IsEmpty());
    const auto own = std::make_shared<const ObservedGroup>(ObservedGroup{"default", {0}, 0});
    ObservedOperation operation;
    operation.kind = "barrier";
    operation.sequence = 1;
    scheduled(own, operation);
    const RankRecord read = read_file(dump("test"));
    EXPECT_EQ(read.world_size, 1);
    ASSERT_EQ(read.entries.size(), 1U);
    EXPECT_EQ(read.entries[0].operation, "barrier");
    EXPECT_EQ(read.overwritten, 0U);
    unwatch_signal();
  });
}

TEST(FlightRecorder, NamesARankAsItWasWhenTheJobBegan) {
  alone([] {
    RecordFolder folder;
    set_world_defaults({.rank = 1, .world_size = 2, .job_rank = 2, .job_size = 3});  // after a shrink_group()
    watch_signal();
    const auto survivors = std::make_shared<const ObservedGroup>(ObservedGroup{"default", {0, 2}, 1});
    ObservedOperation operation;
    operation.kind = "barrier";
    operation.sequence = 1;
    scheduled(survivors, operation);
    const std::string file = dump("test");
    EXPECT_THAT(file, EndsWith("/rank_2.json"));
    EXPECT_EQ(read_file(file).rank, 2);
    EXPECT_EQ(read_file(file).world_size, 3);
    unwatch_signal();
  });
}

/// Waits until the file is there and `ready` says so of its content; the harness's deadline ends a test in
/// vain.
RankRecord wait_for_record(const std::string& path, const std::function<bool(const RankRecord&)>& ready) {
  while (true) {
    if (std::filesystem::exists(path)) {
      const RankRecord read = read_file(path);
      if (ready(read)) return read;
    }
    std::this_thread::yield();
  }
}

TEST(FlightRecorder, WritesOnTheSignalAndTheProcessGoesOn) {
  alone([] {
    RecordFolder folder;
    watch_signal();
    watch_signal();  // again makes no difference
    started(record(1));
    ASSERT_EQ(::kill(::getpid(), SIGUSR1), 0);
    const auto path = folder.path("rank_0.json");
    const RankRecord first = wait_for_record(path, [](const RankRecord&) { return true; });
    EXPECT_EQ(first.reason, "SIGUSR1");
    ASSERT_EQ(first.entries.size(), 1U);
    EXPECT_TRUE(first.entries[0].pending());
    // Nothing changed, but a newer record says that the operation still waits.
    ASSERT_EQ(::kill(::getpid(), SIGUSR1), 0);
    wait_for_record(path, [&](const RankRecord& read) { return read.monotonic_ns > first.monotonic_ns; });
    unwatch_signal();
    std::filesystem::remove(path);
    ASSERT_EQ(::raise(SIGUSR1), 0);  // no longer of interest, and not the end of the process
    EXPECT_THAT(folder.entries(), IsEmpty());
  });
}

TEST(FlightRecorder, TheThreadWritesWhatCameTooSoon) {
  alone([] {
    RecordFolder folder;
    watch_signal();
    for (uint64_t i = 1; i <= 20; ++i) {
      record(i);
      dump("failure");
    }
    wait_for_record(folder.path("rank_0.json"),
                    [](const RankRecord& read) { return read.entries.size() == 20; });
    unwatch_signal();
  });
}

bool program_got_signal = false;

TEST(FlightRecorder, LeavesTheProgramsOwnHandlerAlone) {
  alone([] {
    RecordFolder folder;
    std::signal(SIGUSR1, [](int) { program_got_signal = true; });
    watch_signal();
    record(1);
    std::raise(SIGUSR1);
    EXPECT_TRUE(program_got_signal);
    unwatch_signal();
    EXPECT_THAT(folder.entries(), IsEmpty());
  });
}

TEST(FlightRecorder, DoesNotWatchTheSignalWhenTold) {
  const auto outcomes =
      run_ranks_collect(1,
                        [](int) {
                          watch_signal();
                          std::raise(SIGUSR1);
                        },
                        {.expected_failures = {0}, .environment = {{"LOCKSTEP_FLIGHT_SIGNAL", "0"}}});
  EXPECT_EQ(outcomes.at(0).signal.value_or(0), SIGUSR1);
}

TEST(FlightRecorder, AForkedChildHasNothingToWrite) {
  alone([] {
    RecordFolder folder;
    watch_signal();
    record(1);
    const pid_t child = ::fork();
    if (child == 0) {
      ::raise(SIGUSR1);
      const bool nothing = dump("in the child").empty() && folder.entries().empty();
      record(1);  // groups of its own are recorded
      const bool own = !dump("own").empty() && read_file(folder.path("rank_0.json")).entries.size() == 1;
      ::_exit(nothing && own ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    std::filesystem::remove(folder.path("rank_0.json"));
    // The child's signal reached no thread here: the next thing written is what this process asks for.
    EXPECT_EQ(read_file(dump("parent")).reason, "parent");
    unwatch_signal();
  });
}

TEST(FlightRecorder, ManyThreadsMayRecordAndWrite) {
  alone([] {
    RecordFolder folder;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([i] {
        for (uint64_t sequence = 1; sequence <= 500; ++sequence) {
          const uint64_t id = record(sequence, {at::ones({i})});
          started(id);
          completed(id);
          if (sequence % 100 == 0) dump("test");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    record(501);
    std::string text = dump("end");
    const auto read = read_directories({folder.path()});
    ASSERT_EQ(read.size(), 1U);
    EXPECT_GE(read[0].entries.size(), 100U);
  });
}

// --- where the files go

TEST(FlightDirectory, IsPrivateAndOfThisJob) {
  alone([] {
    RecordFolder temporary;
    ::unsetenv("LOCKSTEP_FLIGHT_DIR");
    ::setenv("TMPDIR", temporary.path().c_str(), 1);
    ::setenv("TORCHELASTIC_RUN_ID", "my/job", 1);
    const std::string path = write_record("rank_0.json", "text");
    EXPECT_EQ(path, record_directory() + "/rank_0.json");
    EXPECT_THAT(path, AllOf(HasSubstr(temporary.path("lockstep-" + std::to_string(::geteuid()) + "/flight-")),
                            HasSubstr("my_job")));
    struct stat status {};
    ASSERT_EQ(::stat(record_directory().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700U);
    ASSERT_EQ(::stat(path.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600U);
  });
}

TEST(FlightDirectory, OldOnesOfOtherJobsGoAsANewOneIsMade) {
  alone([] {
    namespace fs = std::filesystem;
    RecordFolder temporary;
    ::unsetenv("LOCKSTEP_FLIGHT_DIR");
    ::setenv("TMPDIR", temporary.path().c_str(), 1);
    const fs::path ours = temporary.path("lockstep-" + std::to_string(::geteuid()));
    ASSERT_EQ(::mkdir(ours.c_str(), 0700), 0);
    const auto now = fs::file_time_type::clock::now();
    const auto make = [&](const std::string& name, std::chrono::hours age) {
      fs::create_directory(ours / name);
      std::ofstream(ours / name / "rank_0.json") << "{}";
      fs::last_write_time(ours / name, now - age);
    };
    for (int i = 1; i <= 20; ++i) make("flight-old-" + std::to_string(i), std::chrono::hours(24 * i));
    for (int i = 1; i <= 5; ++i) make("flight-new-" + std::to_string(i), std::chrono::hours(0));
    make("not-a-record", std::chrono::hours(24 * 100));
    write_record("rank_0.json", "text");
    std::set<std::string> left;
    for (const auto& entry : fs::directory_iterator(ours)) left.insert(entry.path().filename());
    EXPECT_EQ(left.size(), 1U + 15U + 1U) << "its own, the newest others, and what is none";
    EXPECT_TRUE(left.contains("flight-new-5") && left.contains("flight-old-10"));
    EXPECT_FALSE(left.contains("flight-old-11"));
    EXPECT_TRUE(fs::exists(record_directory() + "/rank_0.json"));
  });
}

TEST(FlightDirectory, ARecordThatIsLargerThanFilesMayBeEndsNoProcess) {
  alone([] {
    const RecordFolder folder;
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    rlimit limit = before;
    limit.rlim_cur = 0;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    std::string error;
    try {
      write_record("rank_0.json", "text");
    } catch (const c10::Error& refused) {
      error = refused.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_THAT(error, HasSubstr("File too large"));
    EXPECT_FALSE(std::filesystem::exists(folder.path("rank_0.json")));
  });
}

TEST(FlightDirectory, RefusesOneThatOthersCouldHavePlaced) {
  alone([] {
    RecordFolder temporary;
    ::unsetenv("LOCKSTEP_FLIGHT_DIR");
    ::setenv("TMPDIR", temporary.path().c_str(), 1);
    const std::string ours = temporary.path("lockstep-" + std::to_string(::geteuid()));
    const auto refused = [] {
      try {
        write_record("rank_0.json", "text");
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("LOCKSTEP_FLIGHT_DIR"));
        return true;
      }
      return false;
    };
    std::filesystem::create_directory(temporary.path("elsewhere"));
    std::filesystem::create_symlink("elsewhere", ours);
    EXPECT_TRUE(refused()) << "a symbolic link";
    std::filesystem::remove(ours);
    ASSERT_EQ(::mkdir(ours.c_str(), 0777), 0);
    ASSERT_EQ(::chmod(ours.c_str(), 0777), 0);
    EXPECT_TRUE(refused()) << "open to all";
    ASSERT_EQ(::chmod(ours.c_str(), 0700), 0);
    EXPECT_FALSE(refused());
  });
}

TEST(FlightDirectory, AFileThatIsALinkIsReplacedNotFollowed) {
  alone([] {
    RecordFolder folder;
    std::ofstream(folder.path("precious")) << "keep";
    std::filesystem::create_symlink(folder.path("precious"), folder.path("rank_0.json"));
    write_record("rank_0.json", "text");
    std::string content;
    std::ifstream(folder.path("precious")) >> content;
    EXPECT_EQ(content, "keep");
    EXPECT_FALSE(std::filesystem::is_symlink(folder.path("rank_0.json")));
  });
}

TEST(FlightDirectory, IsMadeWhereTheUserWantsItAndAFailureIsToldNotThrown) {
  alone([] {
    RecordFolder folder;
    ::setenv("LOCKSTEP_FLIGHT_DIR", folder.path("a/b").c_str(), 1);
    record(1);
    EXPECT_EQ(dump("test"), folder.path("a/b/rank_0.json"));
    std::ofstream(folder.path("file")) << "";
    ::setenv("LOCKSTEP_FLIGHT_DIR", folder.path("file").c_str(), 1);
    record(2);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(dump("test"), "");
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("could not be written"), HasSubstr(folder.path("file"))));
  });
}

}  // namespace
}  // namespace lockstep::flight::recorder_test

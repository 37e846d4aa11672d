#include <chrono>
#include <fcntl.h>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>

#include <gtest/gtest.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/out_of_memory.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::launch::out_of_memory_test {
namespace {

TEST(VictimOfRecord, ReadsWhatTheKernelWrites) {
  const std::string context =
      "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
      "oom_memcg=/job,task_memcg=/job,task=train,pid=3726,uid=1000";
  const std::string killed =
      "Memory cgroup out of memory: Killed process 3726 (train) total-vm:1050624kB, anon-rss:65024kB, "
      "file-rss:4096kB, shmem-rss:0kB, UID:1000 pgtables:172kB oom_score_adj:0";
  using Victim = std::pair<pid_t, std::string>;
  EXPECT_EQ(victim_of_record("6,339,5140900,-;" + context + "\n"), Victim(3726, context));
  EXPECT_EQ(victim_of_record("6,1,2,-;oom-kill:task=x,pid=5,pid=3726,uid=0\n")->first, 3726)
      << "x,pid=5 is a name";
  EXPECT_EQ(victim_of_record("3,340,5140901,-;" + killed + "\n SUBSYSTEM=x\n"), Victim(3726, killed));
  EXPECT_EQ(victim_of_record("3,340,1,-;Out of memory: Killed process 12 (a b) total-vm:1kB\n")->first, 12);
  EXPECT_EQ(
      victim_of_record("3,1,1,-;Out of memory (oom_kill_allocating_task): Killed process 7 (x) a\n")->first,
      7);
}

TEST(VictimOfRecord, TellsOtherRecordsApart) {
  for (const std::string record :
       {"", ";", "6,1,2,-", "6,1,2,-;",
        "6,1,2,-;oom-kill:", "6,1,2,-;oom-kill:task=x,pid=", "6,1,2,-;usb 1-1: Killed process 3",
        "6,1,2,-;train invoked oom-killer: gfp_mask=0x100cca, order=0, oom_score_adj=0",
        "6,1,2,-;oom_reaper: reaped process 3726 (train), now anon-rss:0kB",
        "6,1,2,-;text\n Out of memory: Killed process 3"}) {
    EXPECT_EQ(victim_of_record(record), std::nullopt) << record;
  }
}

TEST(OomKillsIn, ReadsBothVersions) {
  EXPECT_EQ(oom_kills_in("low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"), 3U);
  EXPECT_EQ(oom_kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 18446744073709551615\n"),
            18446744073709551615U);
  for (const std::string text :
       {"", "oom_kill", "oom_kill \n", "oom_kill x", "oom_kill_disable 0\nunder_oom 0\n"}) {
    EXPECT_EQ(oom_kills_in(text), std::nullopt) << text;
  }
}

TEST(CountedKills, ExplainOneEndEachAndOnlyThoseNoticedSoon) {
  const CountedKills::Time start;
  const auto at = [&](int milliseconds) { return start + std::chrono::milliseconds(milliseconds); };
  CountedKills kills(7);
  EXPECT_FALSE(kills.explain(7, at(0))) << "what was there before";
  EXPECT_TRUE(kills.explain(8, at(100)));
  EXPECT_FALSE(kills.explain(8, at(100))) << "it has explained an end";
  kills.look(10, at(1000));
  EXPECT_TRUE(kills.explain(10, at(3000))) << "a large process takes its time";
  EXPECT_TRUE(kills.explain(11, at(3000)));
  EXPECT_TRUE(kills.explain(11, at(6000)));
  EXPECT_FALSE(kills.explain(11, at(6000)));
  kills.look(12, at(7000));  // a process that a worker has started
  kills.look(12, at(11000));
  EXPECT_FALSE(kills.explain(12, at(12001))) << "long before";
  EXPECT_TRUE(kills.explain(13, at(12002)));
}

/// As the kernel's log it gives one record for each read(2).
struct Log {
  Log() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK | O_DIRECT), 0);
    reads.reset(ends[0]);
    writes.reset(ends[1]);
  }
  void write(const std::string& text) const {
    const std::string record = "3,1,1,-;" + text + "\n";
    EXPECT_EQ(::write(writes.get(), record.data(), record.size()), static_cast<ssize_t>(record.size()));
  }
  UniqueFd reads;
  UniqueFd writes;
};

TEST(OutOfMemoryWatch, FindsARecordThatIsWrittenAfterTheSignal) {
  const testing::TemporaryFolder folder;
  Log log;
  OutOfMemoryWatch watch(std::move(log.reads), folder.write("memory.events", "oom_kill 3\n"));
  folder.write("memory.events", "oom_kill 4\n");
  watch.note_kill(7, {});
  watch.note_kill(8, {});
  const std::string killed = "Memory cgroup out of memory: Killed process 7 (train) total-vm:1kB";
  log.write(killed);
  EXPECT_EQ(watch.evidence_of(7), "the kernel's log: " + killed);
  EXPECT_EQ(watch.evidence_of(8), "") << "another signal, by the log that has a record of each";
}

TEST(OutOfMemoryWatch, WithoutALogTheCounterTells) {
  const testing::TemporaryFolder folder;
  const std::string counter = folder.write("memory.events", "oom_kill 3\n");
  OutOfMemoryWatch watch({}, counter);
  folder.write("memory.events", "oom_kill 4\n");
  watch.note_kill(7, {});
  watch.note_kill(8, {});
  EXPECT_EQ(watch.evidence_of(7), counter + " counts a process that the kernel has killed just before");
  EXPECT_EQ(watch.evidence_of(8), "") << "one kill explains one end";
}

}  // namespace
}  // namespace lockstep::launch::out_of_memory_test

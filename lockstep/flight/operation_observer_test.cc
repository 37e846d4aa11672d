#include <cstdlib>
#include <gmock/gmock.h>
#include <mutex>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <lockstep/flight/recorder.h>
#include <lockstep/flight/records.h>
#include <lockstep/flight/testing/record_folder.h>
#include <lockstep/testing/multi_rank.h>

// Each test has a process of its own, because there is one recorder for each.
namespace lockstep::flight::operation_observer_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::run_ranks;

/// Writes down what it hears.
class Listener : public OperationObserver {
 public:
  void scheduled(uint64_t id, const ObservedGroup& group, const ObservedOperation& operation) override {
    std::lock_guard lock(mutex_);
    const auto& inputs = *operation.inputs;
    heard.push_back("scheduled " + std::to_string(id) + ": " + operation.kind + " " +
                    std::to_string(operation.sequence) + " of " + group.name + ", " +
                    std::to_string(inputs.size()) + " tensors");
  }
  void started(uint64_t id) override {
    std::lock_guard lock(mutex_);
    heard.push_back("started " + std::to_string(id));
  }
  void ended(uint64_t id, const std::string* error) override {
    std::lock_guard lock(mutex_);
    heard.push_back("ended " + std::to_string(id) + ": " + (error == nullptr ? "well" : *error));
  }

  std::vector<std::string> heard;

 private:
  std::mutex mutex_;
};

uint64_t call(uint64_t sequence) {
  const auto group = std::make_shared<const ObservedGroup>(ObservedGroup{"default", {0, 1}, 0});
  const std::vector<at::Tensor> inputs{at::ones({2, 3})};
  ObservedOperation operation;
  operation.kind = "all_reduce";
  operation.sequence = sequence;
  operation.inputs = &inputs;
  return scheduled(group, operation);
}

void alone(const std::function<void()>& body,
           std::vector<std::pair<std::string, std::optional<std::string>>> environment = {}) {
  run_ranks(1, [&](int) { body(); }, {.environment = std::move(environment)});
}

TEST(OperationObserver, HearsOfEachOperationWhileItIsAttached) {
  alone([] {
    RecordFolder folder;
    const auto listener = std::make_shared<Listener>();
    const auto other = std::make_shared<Listener>();
    completed(call(1));
    attach(listener);
    attach(other);
    const uint64_t second = call(2);
    const uint64_t third = call(3);
    started(second);
    completed(second);
    failed(second, "an end that comes after the first");
    failed(third, "broken");
    detach(listener);
    completed(call(4));
    EXPECT_THAT(listener->heard, ElementsAre("scheduled 2: all_reduce 2 of default, 1 tensors",
                                             "scheduled 3: all_reduce 3 of default, 1 tensors", "started 2",
                                             "ended 2: well", "ended 3: broken"));
    EXPECT_EQ(other->heard.size(), 7U);
    detach(other);
    detach(other);
    // The recorder has heard the same.
    const RankRecord record = read_file(dump("test"));
    ASSERT_EQ(record.entries.size(), 4U);
    EXPECT_EQ(record.entries[2].error, "broken");
  });
}

TEST(OperationObserver, HearsAlsoWhereNothingIsRecorded) {
  alone(
      [] {
        EXPECT_EQ(call(1), 0U);
        const auto listener = std::make_shared<Listener>();
        attach(listener);
        const uint64_t id = call(2);
        started(id);
        failed(id, "broken");
        EXPECT_EQ(listener->heard.size(), 3U);
        EXPECT_EQ(dump("test"), "");
        detach(listener);
        EXPECT_EQ(call(3), 0U);
      },
      {{"LOCKSTEP_FLIGHT_RECORDS", "0"}});
}

TEST(OperationObserver, HearsTheEndOfAnOperationThatTheRingHasForgotten) {
  alone(
      [] {
        const auto listener = std::make_shared<Listener>();
        attach(listener);
        const uint64_t first = call(1);
        call(2);
        call(3);
        completed(first);
        EXPECT_EQ(listener->heard.back(), "ended 1: well");
      },
      {{"LOCKSTEP_FLIGHT_RECORDS", "2"}});
}

TEST(OperationObserver, IsNotInherited) {
  alone([] {
    const auto listener = std::make_shared<Listener>();
    attach(listener);
    const pid_t child = ::fork();
    if (child == 0) {
      completed(call(1));
      ::_exit(listener->heard.empty() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_THAT(listener->heard, IsEmpty());
  });
}

}  // namespace
}  // namespace lockstep::flight::operation_observer_test

#include <gmock/gmock.h>
#include <memory>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/cuda/operation_records.h>
#include <lockstep/flight/records.h>
#include <lockstep/flight/testing/record_folder.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// What another backend's operations leave in the flight recorder. The works are stand-ins, which end when and
// as a test wants; NCCL's are tested in nccl_device_test.cc. Each test has a process of its own, for the
// recorder.
namespace lockstep::operation_records_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class StandIn final : public c10d::Work {
 public:
  explicit StandIn(bool tells)
      : result_(tells ? c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get()) : nullptr) {}
  bool isCompleted() override { return done_; }
  std::exception_ptr exception() const override { return error_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    TORCH_CHECK(result_, "this kind of work has none");
    return result_;
  }

  void end(c10d::WorkResult how) { result_->markCompleted(c10::IValue(static_cast<int64_t>(how))); }
  void end_silently(const std::exception_ptr& error = nullptr) {
    error_ = error;
    done_ = true;
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> result_;
  bool done_ = false;
  std::exception_ptr error_;
};

struct Fixture {
  explicit Fixture(bool watched = true)
      : records(
            std::make_shared<const flight::ObservedGroup>(flight::ObservedGroup{"default (nccl)", {4, 7}, 1}),
            watched, [this](const char* reason) { reasons.emplace_back(reason); }) {}

  c10::intrusive_ptr<StandIn> submit(const char* kind = "all_reduce", bool tells = true) {
    auto work = c10::make_intrusive<StandIn>(tells);
    records.run(operation(kind), [&] { return work; });
    return work;
  }
  flight::ObservedOperation operation(const char* kind) {
    flight::ObservedOperation one;
    one.kind = kind;
    one.detail = "SUM";
    one.inputs = &tensors;
    one.point_to_point = std::string(kind) == "send";
    if (one.point_to_point) one.peer = 0;
    return one;
  }
  /// As they stand in the file.
  std::vector<flight::Entry> entries() { return flight::read_file(flight::dump("test")).entries; }
  std::vector<flight::State> states() {
    std::vector<flight::State> all;
    for (const auto& entry : entries()) all.push_back(entry.state);
    return all;
  }

  std::vector<at::Tensor> tensors{at::ones({2, 3})};
  std::vector<std::string> reasons;
  OperationRecords records;
};

void alone(const std::function<void()>& body) {
  run_ranks(1, [&](int) {
    flight::RecordFolder folder;
    body();
  });
}

TEST(OperationRecords, FollowWhatTheWatchdogTells) {
  alone([] {
    Fixture fixture;
    const auto first = fixture.submit();
    const auto second = fixture.submit("broadcast");
    fixture.submit("send");
    EXPECT_THAT(fixture.states(),
                ElementsAre(flight::State::kStarted, flight::State::kStarted, flight::State::kStarted));
    second->end(c10d::WorkResult::SUCCESS);
    first->end(c10d::WorkResult::TIMEOUT);
    const auto entries = fixture.entries();
    EXPECT_EQ(entries[0].state, flight::State::kFailed);
    EXPECT_THAT(entries[0].error,
                AllOf(HasSubstr("all_reduce (sequence 1, SUM) failed on rank 7 of group 'default (nccl)'"),
                      HasSubstr("not done within its timeout")));
    EXPECT_EQ(entries[1].state, flight::State::kCompleted);
    EXPECT_EQ(entries[1].sequence, 2U);
    EXPECT_EQ(entries[2].sequence, 1U) << "messages are counted by themselves";
    EXPECT_EQ(entries[2].state, flight::State::kStarted);
    EXPECT_THAT(fixture.reasons, ElementsAre("timeout"));
  });
}

TEST(OperationRecords, AskWhereNothingIsTold) {
  alone([] {
    Fixture blocking(/*watched=*/false);
    const auto first = blocking.submit();
    const auto second = blocking.submit();
    first->end_silently();
    second->end_silently(std::make_exception_ptr(std::runtime_error("the link is down")));
    EXPECT_THAT(blocking.states(), ElementsAre(flight::State::kStarted, flight::State::kStarted))
        << "not asked yet";
    const auto third = blocking.submit("broadcast", /*tells=*/false);
    const auto entries = blocking.entries();
    EXPECT_EQ(entries[0].state, flight::State::kCompleted);
    EXPECT_EQ(entries[1].state, flight::State::kFailed);
    EXPECT_THAT(entries[1].error, HasSubstr("the link is down"));
    EXPECT_EQ(entries[2].state, flight::State::kStarted);
    third->end_silently();
    blocking.records.poll();
    EXPECT_EQ(blocking.states()[2], flight::State::kCompleted);
  });
}

TEST(OperationRecords, NameTheOperationThatCouldNotBegin) {
  alone([] {
    Fixture fixture;
    const auto fail = [&](auto error) {
      fixture.records.run(fixture.operation("all_reduce"), [&]() -> WorkPtr { throw error; });
    };
    const c10::SourceLocation here{__func__, __FILE__, __LINE__};
    EXPECT_THROW(fail(c10::ValueError(here, "the tensor is sparse")), c10::ValueError);
    EXPECT_THAT(fixture.reasons, ElementsAre()) << "the group is as it was";
    EXPECT_THAT(message_of<c10::DistBackendError>([&] { fail(c10::DistBackendError(here, "no such peer")); }),
                AllOf(HasSubstr("no such peer"), HasSubstr("all_reduce (sequence 2, SUM) failed on rank 7")));
    EXPECT_THAT(fixture.reasons, ElementsAre("failure"));
    EXPECT_THAT(fixture.states(), ElementsAre(flight::State::kFailed, flight::State::kFailed));
  });
}

TEST(OperationRecords, ABatchEndsAsOne) {
  alone([] {
    Fixture fixture;
    auto whole = c10::make_intrusive<StandIn>(true);
    fixture.records.begin_batch();
    for (int i = 0; i < 2; ++i) fixture.records.run(fixture.operation("send"), [] { return WorkPtr(); });
    EXPECT_EQ(fixture.records.end_batch([&] { return whole; }), whole);
    EXPECT_THAT(fixture.states(), ElementsAre(flight::State::kStarted, flight::State::kStarted));
    whole->end(c10d::WorkResult::SUCCESS);
    EXPECT_THAT(fixture.states(), ElementsAre(flight::State::kCompleted, flight::State::kCompleted));
  });
}

TEST(OperationRecords, AnAbortFailsWhatIsNotDone) {
  alone([] {
    Fixture fixture;
    const auto done = fixture.submit();
    done->end(c10d::WorkResult::SUCCESS);
    const auto pending = fixture.submit();
    fixture.records.fail_all();
    pending->end(c10d::WorkResult::SUCCESS);  // too late
    const auto entries = fixture.entries();
    EXPECT_EQ(entries[0].state, flight::State::kCompleted);
    EXPECT_EQ(entries[1].state, flight::State::kFailed);
    EXPECT_THAT(entries[1].error, HasSubstr("the group was aborted"));
  });
}

TEST(OperationRecords, WorkWithTheRecorderOff) {
  run_ranks(1,
            [](int) {
              Fixture fixture;
              const auto first = fixture.submit();
              const auto second = fixture.submit();
              second->end(c10d::WorkResult::SUCCESS);
              first->end(c10d::WorkResult::COMM_ERROR);
              EXPECT_THAT(fixture.reasons, ElementsAre("failure"));
            },
            {.environment = {{"LOCKSTEP_FLIGHT_RECORDS", "0"}}});
}

}  // namespace
}  // namespace lockstep::operation_records_test

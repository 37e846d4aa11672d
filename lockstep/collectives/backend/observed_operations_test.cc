#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <mutex>

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/flight/operation_observer.h>
#include <lockstep/testing/multi_rank.h>

// What an observer, of a profiler for example, hears of the operations that a program calls.
namespace lockstep::observed_operations_test {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class Listener : public flight::OperationObserver {
 public:
  struct Heard {
    std::string what;  // "all_reduce of default: 24 bytes"
    bool started = false;
    bool ended = false;
    std::string error = {};
    flight::CodePlace where = {};
  };
  void scheduled(uint64_t id, const flight::ObservedGroup& group,
                 const flight::ObservedOperation& operation) override {
    std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const auto* tensors : {operation.inputs, operation.outputs}) {
      if (tensors == nullptr || bytes > 0) continue;
      for (const at::Tensor& tensor : *tensors) bytes += tensor.nbytes();
    }
    heard_[id].what =
        std::string(operation.kind) + " of " + group.name + ": " + std::to_string(bytes) + " bytes";
    heard_[id].where = operation.where;
  }
  void started(uint64_t id) override {
    std::lock_guard lock(mutex_);
    heard_[id].started = true;
  }
  void ended(uint64_t id, const std::string* error) override {
    std::lock_guard lock(mutex_);
    heard_[id].ended = true;
    if (error != nullptr) heard_[id].error = *error;
  }

  std::vector<Heard> heard() {
    std::lock_guard lock(mutex_);
    std::vector<Heard> result;
    for (const auto& [id, each] : heard_) result.push_back(each);
    return result;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, Heard> heard_;
};

TEST(ObservedOperations, HaveNamesSizesAndEnds) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto listener = std::make_shared<Listener>();
    flight::attach(listener);
    const at::Tensor tensor = at::ones({2, 3});
    all_reduce(tensor);
    const Work reducing = all_reduce(tensor, ReduceOp::SUM, {}, /*async_op=*/true);
    reducing->wait();
    if (rank == 0) send(tensor, 1);
    if (rank == 1) recv(tensor, 0);
    flight::detach(listener);
    barrier();
    std::vector<std::string> whats;
    for (const auto& each : listener->heard()) {
      whats.push_back(each.what);
      EXPECT_TRUE(each.started && each.ended) << each.what;
      EXPECT_EQ(each.error, "");
    }
    EXPECT_THAT(whats, ElementsAre("all_reduce of default: 24 bytes", "all_reduce of default: 24 bytes",
                                   rank == 0 ? "send of default: 24 bytes" : "recv of default: 24 bytes"));
  });
}

TEST(ObservedOperations, EndWithTheirError) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto listener = std::make_shared<Listener>();
    flight::attach(listener);
    EXPECT_THROW(all_reduce(at::ones({2 + rank})), c10::Error);
    const auto heard = listener->heard();
    ASSERT_THAT(heard, SizeIs(1));
    EXPECT_TRUE(heard[0].ended);
    EXPECT_THAT(heard[0].error, HasSubstr("all_reduce"));
  });
}

flight::CodePlace place_in_script() {
  flight::CodePlace place;
  place.file = "train.py";
  place.function = "main";
  place.line = 7;
  return place;
}

TEST(ObservedOperations, HaveThePlaceThatAFinderKnowsWhereNoCallSiteIs) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto listener = std::make_shared<Listener>();
    flight::attach(listener);
    std::vector<at::Tensor> tensors{at::ones({2})};
    const auto backend = default_group()->getBackend(at::kCPU);
    backend->allreduce(tensors)->wait();  // as torch's Python module calls it
    CallSite::set_finder(&place_in_script);
    backend->allreduce(tensors)->wait();
    (rank == 0 ? backend->send(tensors, 1, 0) : backend->recv(tensors, 0, 0))->wait();
    all_reduce(tensors.front());
    CallSite::set_finder(nullptr);
    flight::detach(listener);
    barrier();
    const auto heard = listener->heard();
    ASSERT_THAT(heard, SizeIs(4));
    EXPECT_STREQ(heard[0].where.file, "");
    for (const size_t i : {1U, 2U}) {
      EXPECT_STREQ(heard[i].where.file, "train.py");
      EXPECT_STREQ(heard[i].where.function, "main");
      EXPECT_EQ(heard[i].where.line, 7U);
    }
    EXPECT_THAT(heard[3].where.file, EndsWith("observed_operations_test.cc"));
  });
}

flight::CodePlace unwanted_place() {
  ADD_FAILURE() << "there is nothing that would keep it";
  return {};
}

TEST(ObservedOperations, AskForNoPlaceWhereNothingIsRecorded) {
  testing::run_ranks(1,
                     [](int) {
                       auto world = init_process_group();
                       CallSite::set_finder(&unwanted_place);
                       std::vector<at::Tensor> tensors{at::ones({2})};
                       default_group()->getBackend(at::kCPU)->allreduce(tensors)->wait();
                       CallSite::set_finder(nullptr);
                     },
                     {.environment = {{"LOCKSTEP_FLIGHT_RECORDS", "0"}}});
}

}  // namespace
}  // namespace lockstep::observed_operations_test

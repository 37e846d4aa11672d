#include <atomic>
#include <chrono>
#include <condition_variable>
#include <gmock/gmock.h>
#include <mutex>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/rendezvous/bounded_store.h>
#include <lockstep/rendezvous/store_all_gather.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::bounded_store_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::message_of;

/// Answers until its host is lost, and then not, or with an error.
class LosableStore final : public c10d::PrefixStore {
 public:
  LosableStore() : PrefixStore("", c10::make_intrusive<c10d::HashStore>()) {}

  void lose() {
    const std::lock_guard lock(mutex_);
    lost_ = true;
  }
  void refuse() { refuses_ = true; }
  void find_again() {
    const std::lock_guard lock(mutex_);
    lost_ = false;
    found_.notify_all();
  }
  int calls() const { return calls_; }
  size_t threads() const { return threads_.size(); }

  bool check(const std::vector<std::string>& keys) override {
    ++calls_;
    TORCH_CHECK_WITH(DistNetworkError, !refuses_, "Broken pipe");
    std::unique_lock lock(mutex_);
    threads_.insert(std::this_thread::get_id());
    found_.wait(lock, [&] { return !lost_; });
    return PrefixStore::check(keys);
  }

 private:
  std::mutex mutex_;
  std::condition_variable found_;
  bool lost_ = false;  // guarded by mutex_
  std::set<std::thread::id> threads_;
  std::atomic<bool> refuses_ = false;
  std::atomic<int> calls_ = 0;
};

TEST(BoundedStore, IsTheStoreWhileThatAnswers) {
  const auto store = c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), 60s);
  store->set("a", "1");
  EXPECT_EQ(store->get_to_str("a"), "1");
  EXPECT_EQ(store->add("n", 2), 2);
  EXPECT_TRUE(store->check({"a", "n"}));
  EXPECT_FALSE(store->check({"b"}));
  EXPECT_EQ(store->compareSet("b", "", "first"), "first");
  EXPECT_EQ(store->compareSet("b", "", "second"), "first");
  store->wait({"a"}, 1ms);
  EXPECT_EQ(store->multiGet({"a", "n"}).size(), 2u);
  EXPECT_TRUE(store->deleteKey("a"));
  EXPECT_EQ(store_all_gather(*store, "key", 0, 1, "mine", Deadline::after(60s)).front(), "mine");
  EXPECT_FALSE(store->lost());
}

TEST(BoundedStore, CallsShareOneOtherThread) {
  const auto losable = c10::make_intrusive<LosableStore>();
  BoundedStore store(losable, 60s);
  for (int call = 0; call < 10; ++call) EXPECT_FALSE(store.check({"a"}));
  EXPECT_EQ(losable->calls(), 10);
  EXPECT_EQ(losable->threads(), 1u);
}

TEST(BoundedStore, CallThatFailsIsTheLast) {
  const auto losable = c10::make_intrusive<LosableStore>();
  BoundedStore store(losable, 60s);
  losable->refuse();
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.check({"a"}); }), HasSubstr("Broken pipe"));
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.check({"a"}); }), HasSubstr("Broken pipe"));
  EXPECT_EQ(losable->calls(), 1);
  EXPECT_THAT(store.lost().value_or(""), HasSubstr("Broken pipe"));
}

TEST(BoundedStore, CallWithoutAnAnswerEnds) {
  const auto losable = c10::make_intrusive<LosableStore>();
  BoundedStore store(losable, 50ms);
  losable->lose();
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.check({"a"}); }),
              HasSubstr("no answer within 50 ms"));
  losable->find_again();  // too late
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.check({"a"}); }),
              HasSubstr("no answer within 50 ms"));
}

}  // namespace
}  // namespace lockstep::bounded_store_test

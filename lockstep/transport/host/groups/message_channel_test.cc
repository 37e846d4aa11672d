#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/group_channel.h>
#include <lockstep/transport/host/testing/failure_of.h>

// Messages with ranks as threads of one process, where ThreadSanitizer sees both sides.
namespace lockstep::transport::message_channel_test {
namespace {

using namespace std::chrono_literals;
using Channel = std::shared_ptr<GroupChannel>;
using Bytes = std::vector<std::byte>;

Deadline soon() {
  return Deadline::after(60s);
}
constexpr int kAny = MessageChannel::kAnySource;

Bytes pattern(size_t bytes, unsigned seed) {
  Bytes data(bytes);
  std::mt19937 random(seed);
  std::generate(data.begin(), data.end(), [&] { return static_cast<std::byte>(random()); });
  return data;
}

/// Waits, and throws the request's error.
void wait(MessageChannel& messages, const MessageChannel::Handle& request) {
  ASSERT_TRUE(messages.wait(request));
  if (messages.error(request)) std::rethrow_exception(messages.error(request));
}

/// On which host each of so many ranks is.
struct Layout {
  const char* name;
  int (*host_of)(int rank);
};
constexpr Layout kLayouts[] = {{"OneHost", [](int) { return 0; }},
                               {"HostsOfOneRank", [](int rank) { return rank; }},
                               {"TwoHosts", [](int rank) { return rank % 2; }}};

class Messages : public ::testing::TestWithParam<Layout> {
 protected:
  static void on_ranks(int ranks, const std::function<void(const Channel& channel)>& body) {
    std::vector<int> host_of;
    for (int rank = 0; rank < ranks; ++rank) host_of.push_back(GetParam().host_of(rank));
    testing::run_rank_threads(host_of, body);
  }
};

INSTANTIATE_TEST_SUITE_P(On, Messages, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return std::string(info.param.name); });

/// One byte, empty, around the border of the mailbox, several chunks and several rings.
const std::vector<size_t> kSizes = {0, 1, 8192, 8193, 131072, 1000001, 3 << 20, 9 << 20};

TEST_P(Messages, CarriesEverySizeFromPlainMemory) {
  on_ranks(2, [](const Channel& channel) {
    for (size_t bytes : kSizes) {
      const Bytes expected = pattern(bytes, bytes);
      if (channel->rank() == 0) {
        wait(channel->messages(), channel->messages().send(expected.data(), {bytes, 1}, 1, 0, soon()));
      } else {
        Bytes got(bytes);
        wait(channel->messages(), channel->messages().receive(got.data(), {bytes, 1}, 0, 0, soon()));
        ASSERT_EQ(got, expected);
      }
    }
  });
}

TEST_P(Messages, CarriesEverySizeFromTheArena) {
  on_ranks(2, [](const Channel& channel) {
    Arena& arena = channel->transport().arena();
    for (size_t bytes : kSizes) {
      const Bytes expected = pattern(bytes, bytes + 1);
      if (channel->rank() == 0) {
        std::byte* data = arena.allocate(bytes);
        std::copy(expected.begin(), expected.end(), data);
        wait(channel->messages(), channel->messages().send(data, {bytes, 1}, 1, 0, soon()));
        arena.deallocate(data);
      } else {
        Bytes got(bytes);
        wait(channel->messages(), channel->messages().receive(got.data(), {bytes, 1}, 0, 0, soon()));
        ASSERT_EQ(got, expected);
      }
    }
  });
}

TEST_P(Messages, MessagesOfOneTagKeepTheirOrderAndTagsAreIndependent) {
  constexpr int kMessages = 100;  // far more than the mailbox has room for
  on_ranks(2, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    std::vector<int> values(kMessages);
    std::vector<MessageChannel::Handle> handles;
    if (channel->rank() == 0) {
      std::iota(values.begin(), values.end(), 0);
      for (int i = 0; i < kMessages; ++i)
        handles.push_back(messages.send(&values[i], {sizeof(int), 1}, 1, i % 2, soon()));
    } else {
      // All odd ones first.
      for (int i = 0; i < kMessages; ++i) {
        const int tag = i < kMessages / 2 ? 1 : 0;
        handles.push_back(messages.receive(&values[i], {sizeof(int), 1}, 0, tag, soon()));
      }
    }
    std::shuffle(handles.begin(), handles.end(), std::mt19937(1));
    for (const auto& handle : handles) wait(messages, handle);
    if (channel->rank() == 1) {
      for (int i = 0; i < kMessages; ++i) {
        ASSERT_EQ(values[i], i < kMessages / 2 ? 2 * i + 1 : 2 * (i - kMessages / 2));
      }
    }
  });
}

TEST_P(Messages, LargeSendsInBothDirectionsAtOnceDoNotBlockEachOther) {
  on_ranks(4, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    constexpr size_t kBytes = 2 << 20;
    std::vector<Bytes> out;
    std::vector<Bytes> in(4, Bytes(kBytes));
    std::vector<MessageChannel::Handle> handles;
    for (int peer = 0; peer < 4; ++peer) {
      out.push_back(pattern(kBytes, 10 * channel->rank() + peer));
      handles.push_back(messages.send(out.back().data(), {kBytes, 1}, peer, 7, soon()));
    }
    for (int peer = 3; peer >= 0; --peer)
      handles.push_back(messages.receive(in[peer].data(), {kBytes, 1}, peer, 7, soon()));
    for (const auto& handle : handles) wait(messages, handle);
    for (int peer = 0; peer < 4; ++peer) ASSERT_EQ(in[peer], pattern(kBytes, 10 * peer + channel->rank()));
  });
}

TEST_P(Messages, AnySourceTakesWhatComesAndSaysFromWhom) {
  on_ranks(4, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    if (channel->rank() != 0) {
      const int value = channel->rank() * 11;
      wait(messages, messages.send(&value, {sizeof value, 1}, 0, 3, soon()));
      return;
    }
    std::vector<int> sources;
    for (int i = 0; i < 3; ++i) {
      int value = 0;
      auto handle = messages.receive(&value, {sizeof value, 1}, kAny, 3, soon());
      wait(messages, handle);
      sources.push_back(messages.source(handle));
      EXPECT_EQ(value, sources.back() * 11);
    }
    std::sort(sources.begin(), sources.end());
    EXPECT_EQ(sources, (std::vector<int>{1, 2, 3}));
  });
}

TEST_P(Messages, BackgroundServiceAdvancesWhatNoThreadWaitsFor) {
  on_ranks(2, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    constexpr size_t kBytes = 5 << 20;
    Bytes data = channel->rank() == 0 ? pattern(kBytes, 5) : Bytes(kBytes);
    std::atomic<bool> done{false};
    auto handle = channel->rank() == 0
                      ? messages.send(data.data(), {kBytes, 1}, 1, 0, soon(),
                                      [&](const std::exception_ptr&) { done.store(true); })
                      : messages.receive(data.data(), {kBytes, 1}, 0, 0, soon(),
                                         [&](const std::exception_ptr&) { done.store(true); });
    messages.advance_in_background();
    while (!done.load()) std::this_thread::yield();  // no wait(), no is_done()
    EXPECT_TRUE(messages.wait(handle));
    EXPECT_EQ(data, pattern(kBytes, 5));
  });
}

TEST_P(Messages, AWaiterTakesOverFromTheBackground) {
  on_ranks(2, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    for (int round = 0; round < 200; ++round) {
      int value = round;
      int got = -1;
      auto receive = messages.receive(&got, {sizeof got, 1}, 1 - channel->rank(), 0, soon());
      messages.advance_in_background();
      auto send = messages.send(&value, {sizeof value, 1}, 1 - channel->rank(), 0, soon());
      wait(messages, receive);
      wait(messages, send);
      ASSERT_EQ(got, round);
    }
  });
}

TEST_P(Messages, SeveralThreadsOfARankWaitAtOnce) {
  constexpr int kThreads = 4;
  on_ranks(2, [](const Channel& channel) {
    std::vector<std::jthread> threads;
    for (int tag = 0; tag < kThreads; ++tag) {
      threads.emplace_back([&, tag] {
        MessageChannel& messages = channel->messages();
        for (int round = 0; round < 100; ++round) {
          const size_t bytes = round % 10 == 0 ? 100000 : 8;
          Bytes data = pattern(bytes, round * kThreads + tag);
          if ((round + channel->rank()) % 2 == 0) {
            wait(messages, messages.send(data.data(), {bytes, 1}, 1 - channel->rank(), tag, soon()));
          } else {
            Bytes got(bytes);
            wait(messages, messages.receive(got.data(), {bytes, 1}, 1 - channel->rank(), tag, soon()));
            ASSERT_EQ(got, data);
          }
        }
      });
    }
  });
}

TEST_P(Messages, AMismatchIsToldToBothSides) {
  for (size_t bytes : {size_t{8}, size_t{100000}}) {
    on_ranks(2, [bytes](const Channel& channel) {
      MessageChannel& messages = channel->messages();
      Bytes data = pattern(bytes, 1);
      if (channel->rank() == 0) {
        auto handle = messages.send(data.data(), {bytes, 6}, 1, 0, soon());
        // What travels in the mailbox is sent before any rank can look at it.
        if (bytes <= 8192) {
          wait(messages, handle);
        } else {
          EXPECT_THROW(wait(messages, handle), MessageMismatch);
        }
      } else {
        const Bytes before = data;
        auto handle = messages.receive(data.data(), {bytes, 7}, 0, 0, soon());
        try {
          wait(messages, handle);
          ADD_FAILURE() << "should have thrown";
        } catch (const MessageMismatch& mismatch) {
          EXPECT_EQ(mismatch.sent.type, 6u);
          EXPECT_EQ(mismatch.expected.type, 7u);
          EXPECT_EQ(mismatch.sent.bytes, bytes);
        }
        EXPECT_EQ(data, before);
      }
      // The group goes on.
      int value = channel->rank();
      auto handle = channel->rank() == 0 ? messages.send(&value, {4, 1}, 1, 0, soon())
                                         : messages.receive(&value, {4, 1}, 0, 0, soon());
      wait(messages, handle);
      EXPECT_EQ(value, 0);
    });
  }
}

TEST_P(Messages, TimeoutsLeaveNothingBehind) {
  for (size_t bytes : {size_t{8}, size_t{100000}}) {
    on_ranks(2, [bytes](const Channel& channel) {
      MessageChannel& messages = channel->messages();
      Bytes data = pattern(bytes, 1);
      int ready = 0;
      if (channel->rank() == 0) {
        if (bytes > 8192) {
          auto lost = messages.send(data.data(), {bytes, 1}, 1, 5, Deadline::after(1ms));
          EXPECT_NE(failure_of([&] { wait(messages, lost); }, FailureKind::kTimeout).find("rank 1"),
                    std::string::npos);
        }
        wait(messages, messages.send(&ready, {4, 1}, 1, 1, soon()));
        wait(messages, messages.receive(&ready, {4, 1}, 1, 2, soon()));
        wait(messages, messages.send(data.data(), {bytes, 1}, 1, 5, soon()));
      } else {
        Bytes got(bytes);
        auto early = messages.receive(got.data(), {bytes, 1}, 0, 9, Deadline::after(1ms));
        EXPECT_NE(failure_of([&] { wait(messages, early); }, FailureKind::kTimeout).find("rank 0"),
                  std::string::npos);
        wait(messages, messages.receive(&ready, {4, 1}, 0, 1, soon()));
        wait(messages, messages.send(&ready, {4, 1}, 0, 2, soon()));
        wait(messages, messages.receive(got.data(), {bytes, 1}, 0, 5, soon()));
        EXPECT_EQ(got, data);
      }
    });
  }
}

TEST_P(Messages, AWaitMayEndBeforeItsRequest) {
  on_ranks(2, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    int value = 0;
    int go = 0;
    if (channel->rank() == 0) {
      auto handle = messages.receive(&value, {4, 1}, 1, 0, soon());
      EXPECT_FALSE(messages.wait(handle, Deadline::after(1ms)));
      wait(messages, messages.send(&go, {4, 1}, 1, 1, soon()));
      EXPECT_TRUE(messages.wait(handle));
      EXPECT_EQ(value, 42);
    } else {
      wait(messages, messages.receive(&go, {4, 1}, 0, 1, soon()));
      value = 42;
      wait(messages, messages.send(&value, {4, 1}, 0, 0, soon()));
    }
  });
}

TEST_P(Messages, APeerThatLeftFailsItsRequestsButNotWhatItSent) {
  on_ranks(3, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    int value = channel->rank();
    if (channel->rank() == 1) {
      wait(messages, messages.send(&value, {4, 1}, 0, 0, soon()));
      messages.close();
      channel->leave();
    } else if (channel->rank() == 2) {
      wait(messages, messages.receive(&value, {4, 1}, 0, 0, soon()));
      wait(messages, messages.send(&value, {4, 1}, 0, 8, soon()));
    } else {
      auto too_much = messages.receive(&value, {4, 1}, 1, 5, soon());
      const auto text = failure_of([&] { wait(messages, too_much); }, FailureKind::kPeerLeft);
      EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
      Bytes large(100000);
      auto unwanted = messages.send(large.data(), {large.size(), 1}, 1, 0, soon());
      failure_of([&] { wait(messages, unwanted); }, FailureKind::kPeerLeft);
      wait(messages, messages.receive(&value, {4, 1}, 1, 0, soon()));
      EXPECT_EQ(value, 1);
      // The ranks that are left can still be received from.
      wait(messages, messages.send(&value, {4, 1}, 2, 0, soon()));
      auto any = messages.receive(&value, {4, 1}, kAny, 8, soon());
      wait(messages, any);
      EXPECT_EQ(messages.source(any), 2);
    }
  });
}

TEST_P(Messages, ManyThatAPeerSentBeforeItLeftStillCome) {
  constexpr int kMessages = 8;  // as many as a mailbox holds
  on_ranks(2, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    std::vector<Bytes> data;
    if (channel->rank() == 1) {
      for (int i = 0; i < kMessages; ++i) {
        data.push_back(pattern(layout::kInlineBytes, i));
        wait(messages, messages.send(data.back().data(), {layout::kInlineBytes, 1}, 0, i, soon()));
      }
      messages.close();
      return channel->leave();
    }
    Bytes got(layout::kInlineBytes);
    const auto never_sent = messages.receive(got.data(), {got.size(), 1}, 1, kMessages, soon());
    failure_of([&] { wait(messages, never_sent); }, FailureKind::kPeerLeft);
    for (int i = kMessages - 1; i >= 0; --i) {
      wait(messages, messages.receive(got.data(), {got.size(), 1}, 1, i, soon()));
      ASSERT_EQ(got, pattern(layout::kInlineBytes, i));
    }
  });
}

TEST_P(Messages, AbortEndsAllWaitsOfTheGroup) {
  on_ranks(3, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    int value = 0;
    Bytes large(100000);
    if (channel->rank() == 2) {
      wait(messages, messages.receive(&value, {4, 1}, 0, 1, soon()));
      wait(messages, messages.receive(&value, {4, 1}, 1, 1, soon()));
      channel->abort();
      return;
    }
    auto receive = messages.receive(&value, {4, 1}, 2, 0, soon());
    auto send = messages.send(large.data(), {large.size(), 1}, 2, 0, soon());
    int ready = 0;
    wait(messages, messages.send(&ready, {4, 1}, 2, 1, soon()));
    const auto text = failure_of([&] { wait(messages, receive); }, FailureKind::kAborted);
    EXPECT_NE(text.find("rank 2"), std::string::npos) << text;
    failure_of([&] { wait(messages, send); }, FailureKind::kAborted);
    failure_of([&] { messages.receive(&value, {4, 1}, 2, 0, soon()); }, FailureKind::kAborted);
  });
}

TEST_P(Messages, WhosePeerGivesUpAsTheGroupFailsIsToldWhy) {
  for (const bool sender_gives_up : {false, true}) {
    std::barrier together(2);
    on_ranks(2, [&](const Channel& channel) {
      MessageChannel& messages = channel->messages();
      Bytes data(100000);
      const int other = 1 - channel->rank();
      const bool sends = (channel->rank() == 1) == sender_gives_up;
      const auto start = [&] {
        return sends ? messages.send(data.data(), {data.size(), 1}, other, 0, soon())
                     : messages.receive(data.data(), {data.size(), 1}, other, 0, soon());
      };
      MessageChannel::Handle handle;
      if (sends) handle = start();
      together.arrive_and_wait();  // it is offered
      if (!sends) handle = start();
      together.arrive_and_wait();  // and claimed
      if (channel->rank() == 1) {
        channel->abort();
        failure_of([&] { wait(messages, handle); }, FailureKind::kAborted);
      }
      together.arrive_and_wait();  // and given up
      const auto text = failure_of([&] { wait(messages, handle); }, FailureKind::kAborted);
      EXPECT_NE(text.find("aborted by rank 1"), std::string::npos) << text;
      together.arrive_and_wait();  // no rank has left before
    });
  }
}

TEST_P(Messages, CloseEndsWhatIsPending) {
  std::barrier both_done(2);  // no rank's leaving is another's cause
  on_ranks(2, [&](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    int value = 0;
    auto handle = messages.receive(&value, {4, 1}, 1 - channel->rank(), 0, soon());
    messages.advance_in_background();
    messages.close();
    failure_of([&] { wait(messages, handle); }, FailureKind::kAborted);
    EXPECT_THROW(messages.receive(&value, {4, 1}, 0, 0, soon()), c10::Error);
    both_done.arrive_and_wait();
  });
}

// ---- what this rank lacks

TEST_P(Messages, SendThatFailedIsNeverDeliveredAndDisturbsNoOther) {
  failpoint::configure("send=error(no memory)@1");
  std::atomic<bool> failed_once{false};
  on_ranks(2, [&failed_once](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    std::array<int, 3> values{};
    if (channel->rank() == 0) {
      values = {1, 2, 0};
      const auto failed = messages.send(&values[0], {sizeof(int), 1}, 1, 0, soon());
      failed_once = true;
      EXPECT_TRUE(messages.is_done(failed));
      EXPECT_NE(text_of(messages.error(failed)).find("no memory"), std::string::npos);
      wait(messages, messages.receive(&values[2], {sizeof(int), 1}, 1, 0, soon()));
      EXPECT_EQ(values[2], 3);
      wait(messages, messages.send(&values[1], {sizeof(int), 1}, 1, 0, soon()));
    } else {
      // In its own time, so that rank 0's failed send would have come first.
      const auto received = messages.receive(&values[1], {sizeof(int), 1}, 0, 0, soon());
      values[0] = 3;
      while (!failed_once) std::this_thread::yield();  // the failpoint is for rank 0
      wait(messages, messages.send(&values[0], {sizeof(int), 1}, 0, 0, soon()));
      wait(messages, received);
      EXPECT_EQ(values[1], 2);
    }
  });
  failpoint::configure("");
}

TEST_P(Messages, WithoutAThreadOfTheirOwnTheyMoveWhereTheyAreWaitedFor) {
  while (background_thread_count() > 0) std::this_thread::yield();  // an idle one would serve
  failpoint::configure("start_thread=errno(11)");
  std::barrier both_done(2);  // no rank's leaving is another's cause
  on_ranks(2, [&](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    const Bytes expected = pattern(1 << 20, 1);
    Bytes got(expected.size());
    const auto sent = messages.send(expected.data(), {expected.size(), 1}, 1 - channel->rank(), 0, soon());
    messages.advance_in_background();
    const auto received = messages.receive(got.data(), {got.size(), 1}, 1 - channel->rank(), 0, soon());
    messages.advance_in_background();
    bool told = false;
    messages.tell_in_background([&] { told = true; });
    EXPECT_TRUE(told);
    wait(messages, received);
    wait(messages, sent);
    EXPECT_EQ(got, expected);
    both_done.arrive_and_wait();
    messages.close();  // waits for no thread
  });
  failpoint::configure("");
}

TEST_P(Messages, FailureInTheBackgroundFailsTheMessageNotTheProcess) {
  constexpr int kMessages = 3 * static_cast<int>(layout::kMailboxSlots);
  std::atomic<bool> sent{false};
  on_ranks(2, [&sent](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    std::vector<int> values(kMessages);
    std::vector<MessageChannel::Handle> handles;
    if (channel->rank() == 0) {
      // The mailbox is full long before, so that the background thread meets the failure.
      failpoint::configure("send=error(no memory)@" + std::to_string(2 * layout::kMailboxSlots));
      for (int& value : values) handles.push_back(messages.send(&value, {sizeof(int), 1}, 1, 0, soon()));
      messages.advance_in_background();
      sent = true;
      while (!messages.is_done(handles.back())) std::this_thread::yield();
      int failed = 0;
      for (const auto& handle : handles) failed += messages.error(handle) != nullptr ? 1 : 0;
      EXPECT_EQ(failed, 1);
      failpoint::configure("");
    } else {
      while (!sent) std::this_thread::yield();
      for (int i = 0; i + 1 < kMessages; ++i) {
        wait(messages, messages.receive(&values[i], {sizeof(int), 1}, 0, 0, soon()));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::transport::message_channel_test

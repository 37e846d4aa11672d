#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/transport/host/process_header.h>
#include <lockstep/transport/host/testing/failure_of.h>
#include <lockstep/transport/host/testing/message_ranks.h>

// What is sent comes as it was and in its order, and waits end in time.
namespace lockstep::transport::message_channel_test {
namespace {

using namespace std::chrono_literals;
using namespace message_testing;

class Messages : public OnLayouts {};

INSTANTIATE_TEST_SUITE_P(On, Messages, ::testing::ValuesIn(kLayouts), layout_name);

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

TEST(MessagesBetweenHosts, SayWhatTheirSenderDoes) {
  testing::run_rank_threads(std::vector<int>{0, 1}, [](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    HostTransport& transport = channel->transport();
    int value = 0;
    if (channel->rank() == 1) {
      header_of(transport.arena().segment(0)->data()).phases.action =
          uint64_t{'B'} << 56 | uint64_t{1} << 32 | 3;
      wait(messages, messages.send(&value, {4, 1}, 0, 0, soon()));
      wait(messages, messages.receive(&value, {4, 1}, 0, 0, soon()));
      return;
    }
    wait(messages, messages.receive(&value, {4, 1}, 1, 0, soon()));
    EXPECT_EQ(transport.in_or_after_action(1), " in or after 1B3");
    auto late = messages.receive(&value, {4, 1}, 1, 9, Deadline::after(1ms));
    const auto text = failure_of([&] { wait(messages, late); }, FailureKind::kTimeout);
    EXPECT_NE(text.find(" on host-1), which was in or after 1B3; a late rank"), std::string::npos) << text;
    transport.forget_actions();
    EXPECT_EQ(transport.in_or_after_action(1), "");
    wait(messages, messages.send(&value, {4, 1}, 1, 0, soon()));
  });
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

}  // namespace
}  // namespace lockstep::transport::message_channel_test

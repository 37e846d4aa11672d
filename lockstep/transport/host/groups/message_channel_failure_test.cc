#include <array>
#include <atomic>
#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/transport/host/testing/failure_of.h>
#include <lockstep/transport/host/testing/message_ranks.h>

// What is told of messages that do not come: their peer leaves, the group ends, or this rank lacks something.
namespace lockstep::transport::message_channel_failure_test {
namespace {

using namespace message_testing;

class MessageFailures : public OnLayouts {};

INSTANTIATE_TEST_SUITE_P(On, MessageFailures, ::testing::ValuesIn(kLayouts), layout_name);

TEST_P(MessageFailures, APeerThatLeftFailsItsRequestsButNotWhatItSent) {
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

TEST_P(MessageFailures, ManyThatAPeerSentBeforeItLeftStillCome) {
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

TEST_P(MessageFailures, AbortEndsAllWaitsOfTheGroup) {
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

TEST_P(MessageFailures, WhosePeerGivesUpAsTheGroupFailsIsToldWhy) {
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

TEST_P(MessageFailures, CloseEndsWhatIsPending) {
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

TEST_P(MessageFailures, SendThatFailedIsNeverDeliveredAndDisturbsNoOther) {
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

TEST_P(MessageFailures, WithoutAThreadOfTheirOwnTheyMoveWhereTheyAreWaitedFor) {
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

TEST_P(MessageFailures, ADeadlineMayBeSetLater) {
  std::barrier both_done(2);
  on_ranks(2, [&](const Channel& channel) {
    MessageChannel& messages = channel->messages();
    int value = 0;
    if (channel->rank() == 0) {
      const auto received = messages.receive(&value, {sizeof(int), 1}, 1, 0, Deadline::never());
      messages.advance_in_background();  // a thread that sleeps without end
      messages.set_deadline(received, Deadline::after(std::chrono::milliseconds(20)));
      EXPECT_TRUE(messages.wait(received));
      EXPECT_NE(text_of(messages.error(received)).find("timed out after"), std::string::npos);
      messages.set_deadline(received, Deadline::after(std::chrono::milliseconds(1)));  // nothing
    }
    both_done.arrive_and_wait();
  });
}

TEST_P(MessageFailures, FailureInTheBackgroundFailsTheMessageNotTheProcess) {
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
}  // namespace lockstep::transport::message_channel_failure_test

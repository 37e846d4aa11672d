#include <atomic>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/algorithms/staging.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::point_to_point_test {
namespace {

namespace algorithms = collectives::internal::algorithms;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using Kind = P2POp::Kind;

// Elements of a message whose send returns before it is received, and of one whose send must wait for the receiver.
constexpr int64_t kSmall = 10;
constexpr int64_t kLarge = 1'000'000;

TEST(PointToPoint, EveryTypeSizeAndMemoryArrives) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    algorithms::set_chunk_bytes_for_testing(4096);
    for (auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kBool, at::kByte, at::kLong,
                      at::kComplexFloat, at::kComplexDouble}) {
      for (int64_t numel : {0, 1, 1000, 5003, 40000}) {
        for (int memory = 0; memory < 4; ++memory) {  // which sides have the message where the peer sees it
          const at::Tensor right = at::arange(numel, at::kLong).remainder(251).to(type);
          const bool shared = (memory >> rank & 1) != 0;
          at::Tensor tensor = shared ? empty_shared({numel}, type) : at::empty({numel}, type);
          if (rank == 0) {
            tensor.copy_(right);
            send(tensor, 1);
          } else {
            tensor.zero_();
            EXPECT_EQ(recv(tensor, 0), 0);
          }
          ASSERT_TRUE(at::equal(tensor, right)) << type << ' ' << numel << ' ' << memory;
        }
      }
    }
  });
}

TEST(PointToPoint, ElementsAreCountedShapesAreNotCompared) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const at::Tensor flat = at::arange(12, at::kInt);
    if (rank == 0) {
      send(flat, 1);
    } else {
      at::Tensor matrix = at::zeros({3, 4}, at::kInt);
      recv(matrix, 0);
      EXPECT_TRUE(at::equal(matrix, flat.view({3, 4})));
    }
  });
}

TEST(PointToPoint, SmallMessagesDontWaitForTheReceiver) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    // Both send first: with messages that had to be fetched this would never end.
    for (int i = 0; i < 50; ++i) {
      at::Tensor out = at::full({kSmall}, 100 * rank + i, at::kInt);
      send(out, 1 - rank);
      out.fill_(-1);  // the tensor may be used again
      at::Tensor in = at::empty({kSmall}, at::kInt);
      recv(in, 1 - rank);
      ASSERT_EQ(in[kSmall - 1].item<int>(), 100 * (1 - rank) + i);
    }
  });
}

TEST(PointToPoint, MessagesOfOneTagArriveInOrderAndTagsAreKeptApart) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (int64_t numel : {kSmall, kLarge}) {
      constexpr int kMessages = 5;
      std::vector<at::Tensor> tensors;
      std::vector<Work> works;
      // Sent by index, received by tag from the highest down.
      for (int i = 0; i < 3 * kMessages; ++i) {
        const int tag = rank == 0 ? i % 3 : 2 - i / kMessages;
        const int number = rank == 0 ? i / 3 : i % kMessages;
        tensors.push_back(at::full({numel}, rank == 0 ? 10 * tag + number : -1, at::kInt));
        works.push_back(rank == 0 ? isend(tensors.back(), 1, {}, tag) : irecv(tensors.back(), 0, {}, tag));
        if (rank == 1) {
          works.back()->wait();
          ASSERT_EQ(tensors.back()[0].item<int>(), 10 * tag + number);
          ASSERT_EQ(tensors.back()[numel - 1].item<int>(), 10 * tag + number);
        }
      }
      for (const Work& work : works) work->wait();
    }
  });
}

TEST(PointToPoint, ReceivesFromAnySourceTakeEachMessageOnceAndEachSendersInOrder) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    for (int64_t numel : {kSmall, kLarge / 10}) {
      constexpr int kMessages = 20;
      if (rank != 0) {
        send(at::full({numel}, -rank, at::kInt), 0, {}, 8);  // another tag: not for the rank that wants 7
        for (int i = 0; i < kMessages; ++i) send(at::full({numel}, 1000 * rank + i, at::kInt), 0, {}, 7);
        barrier();
        continue;
      }
      std::vector<Work> early;
      std::vector<at::Tensor> from_name;
      for (int sender = 1; sender < 4; ++sender) {
        from_name.push_back(at::empty({numel}, at::kInt));
        early.push_back(irecv(from_name.back(), sender, {}, 8));
      }
      std::vector<int> seen(4, 0);
      for (int i = 0; i < 3 * kMessages; ++i) {
        at::Tensor in = at::empty({numel}, at::kInt);
        int source = -1;
        if (i % 2 == 0) {
          source = recv(in, std::nullopt, {}, 7);
        } else {
          Work work = irecv(in, std::nullopt, {}, 7);
          work->wait();
          source = work->sourceRank();
        }
        ASSERT_TRUE(source >= 1 && source <= 3) << source;
        ASSERT_TRUE(
            at::equal(in, at::full({numel}, 1000 * source + seen[static_cast<size_t>(source)]++, at::kInt)));
      }
      for (int sender = 1; sender < 4; ++sender) {
        early[static_cast<size_t>(sender - 1)]->wait();
        EXPECT_EQ(from_name[static_cast<size_t>(sender - 1)][0].item<int>(), -sender);
      }
      barrier();
    }
  });
}

TEST(PointToPoint, SeveralReceivesFromAnySourceWaitAtOnce) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    if (rank == 0) {
      std::vector<at::Tensor> tensors;
      std::vector<Work> works;
      for (int i = 0; i < 6; ++i) {
        tensors.push_back(at::full({kSmall}, -1, at::kInt));
        works.push_back(irecv(tensors.back()));
      }
      barrier();  // now they may send
      std::multiset<int> sources;
      for (int i = 0; i < 6; ++i) {
        works[static_cast<size_t>(i)]->wait();
        const int source = works[static_cast<size_t>(i)]->sourceRank();
        sources.insert(source);
        EXPECT_EQ(tensors[static_cast<size_t>(i)][0].item<int>() / 10, source);
      }
      EXPECT_EQ(sources.count(1), 3u);
      EXPECT_EQ(sources.count(2), 3u);
    } else {
      barrier();
      for (int i = 0; i < 3; ++i) send(at::full({kSmall}, 10 * rank + i, at::kInt), 0);
    }
  });
}

TEST(PointToPoint, ManyMessagesMayLieUnreceived) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    constexpr int kMessages = 3000;
    std::vector<Work> works;
    if (rank == 0) {
      for (int i = 0; i < kMessages; ++i) works.push_back(isend(at::full({kSmall}, i, at::kInt), 1));
    }
    barrier();  // none of them has been asked for yet
    for (int i = 0; i < kMessages && rank == 1; ++i) {
      at::Tensor in = at::empty({kSmall}, at::kInt);
      recv(in, 0);
      ASSERT_EQ(in[0].item<int>(), i);
    }
    for (const Work& work : works) work->wait();
  });
}

TEST(PointToPoint, TakesNoPartInTheOrderOfCollectives) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (int64_t numel : {kSmall, kLarge}) {
      // Rank 0 sends around its all_reduces, rank 1 receives at other places, rank 2 knows nothing of it.
      at::Tensor sum = at::ones({5000});
      at::Tensor message = at::full({numel}, rank, at::kInt);
      std::vector<Work> works;
      if (rank == 0) works.push_back(isend(message, 1));
      all_reduce(sum);
      if (rank == 1) {
        recv(message, 0);
        EXPECT_EQ(message.max().item<int>(), 0);
      }
      all_reduce(sum);
      if (rank == 1) works.push_back(irecv(message, 0));
      works.push_back(all_reduce(sum, ReduceOp::SUM, {}, true));
      if (rank == 0) send(message.fill_(9), 1);
      for (const Work& work : works) work->wait();
      EXPECT_EQ(sum[0].item<float>(), 27);
      if (rank == 1) {
        EXPECT_EQ(message.min().item<int>(), 9);
      }
    }
  });
}

TEST(PointToPoint, BatchesCrossInAnyOrder) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    const int ranks = world.size();
    for (int64_t numel : {kSmall, kLarge}) {
      for (bool sends_first : {true, false}) {
        // Each rank with each, with large messages too: sends alone would wait for each other for ever.
        std::vector<P2POp> sends, receives;
        for (int peer = 0; peer < ranks; ++peer) {
          if (peer == rank) continue;
          sends.push_back({Kind::kSend, at::full({numel}, 10 * rank + peer, at::kInt), peer});
          receives.push_back({Kind::kReceive, at::full({numel}, -1, at::kInt), peer});
        }
        if (rank % 2 == 0) std::reverse(sends.begin(), sends.end());
        std::vector<P2POp> batch = sends_first ? sends : receives;
        const auto& rest = sends_first ? receives : sends;
        batch.insert(batch.end(), rest.begin(), rest.end());
        const auto works = batch_isend_irecv(batch);
        ASSERT_EQ(works.size(), batch.size());
        for (const Work& work : works) work->wait();
        for (const P2POp& receive : receives) {
          ASSERT_TRUE(at::equal(receive.tensor, at::full({numel}, 10 * receive.peer + rank, at::kInt)));
        }
        for (const P2POp& send : sends) {
          ASSERT_TRUE(at::equal(send.tensor, at::full({numel}, 10 * rank + send.peer, at::kInt)));
        }
      }
    }
  });
}

TEST(PointToPoint, WorkTellsWhatIsGoingOn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = at::full({kLarge}, rank, at::kFloat);
    if (rank == 0) {
      Work work = irecv(tensor, 1);
      EXPECT_FALSE(work->isCompleted());
      EXPECT_THROW(work->wait(20ms), DistTimeoutError) << "this wait only";
      barrier();
      work->getFuture()->wait();  // only the group runs it
      EXPECT_TRUE(work->isCompleted());
      EXPECT_TRUE(work->isSuccess());
      EXPECT_EQ(work->sourceRank(), 1);
      EXPECT_EQ(work->result().size(), 1u);
      EXPECT_EQ(tensor.min().item<float>(), 1);
    } else {
      barrier();
      Work work = isend(tensor, 0);
      work->wait();
      EXPECT_TRUE(work->isCompleted());
    }
  });
}

TEST(PointToPoint, GroupsHaveTheirOwnMessagesAndRanksAreGlobal) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    auto group = new_group({3, 1}, {}, {.sort_ranks = false});
    auto other = new_group({1, 3});
    if (rank == 1) {
      send(at::full({kSmall}, 1, at::kInt), 3, group);
      send(at::full({kSmall}, 2, at::kInt), 3, other);
      send(at::full({kSmall}, 3, at::kInt), 3);
    } else if (rank == 3) {
      at::Tensor in = at::empty({kSmall}, at::kInt);
      EXPECT_EQ(recv(in, 1), 1);
      EXPECT_EQ(in[0].item<int>(), 3);
      EXPECT_EQ(recv(in, std::nullopt, other), 1) << "the global rank";
      EXPECT_EQ(in[0].item<int>(), 2);
      Work work = irecv(in, 1, group);
      work->wait();
      EXPECT_EQ(work->sourceRank(), 1) << "rank 1's rank within {3, 1}";
      EXPECT_EQ(in[0].item<int>(), 1);
    } else {
      at::Tensor tensor = at::ones({1});
      EXPECT_THROW(send(tensor, 1, group), c10::ValueError) << "not a member";
      EXPECT_THROW(recv(tensor, 1, group), c10::ValueError);
    }
  });
}

TEST(PointToPoint, MessagesToOneselfNeedNotWait) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  for (int64_t numel : {kSmall, kLarge}) {
    at::Tensor in = at::zeros({numel});
    const at::Tensor out = at::full({numel}, 3.0f);
    for (const Work& work : batch_isend_irecv({{Kind::kSend, out, 0}, {Kind::kReceive, in, 0}})) work->wait();
    EXPECT_TRUE(at::equal(in, out));
  }
}

TEST(PointToPoint, ThreadsOfOneProcessHaveTheirOwnTags) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<std::jthread> threads;
    for (int tag = 0; tag < 3; ++tag) {
      threads.emplace_back([rank, tag] {
        for (int i = 0; i < 100; ++i) {
          at::Tensor tensor = at::full({i % 10 == 9 ? kLarge / 20 : kSmall}, 1000 * tag + i, at::kInt);
          if ((i + rank) % 2 == 0) {
            send(tensor, 1 - rank, {}, tag);
          } else {
            tensor.fill_(-1);
            recv(tensor, 1 - rank, {}, tag);
            ASSERT_EQ(tensor.max().item<int>(), 1000 * tag + i);
          }
        }
      });
    }
  });
}

TEST(PointToPoint, BadArgumentsAreRefusedAtOnce) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = at::ones({3});
    EXPECT_THROW(send(tensor, rank), c10::ValueError) << "to itself";
    EXPECT_THROW(recv(tensor, rank), c10::ValueError);
    EXPECT_THROW(send(tensor, 2), c10::ValueError);
    EXPECT_THROW(isend(tensor, -1), c10::ValueError);
    EXPECT_THROW(irecv(tensor, 2), c10::ValueError);
    EXPECT_THROW(send(at::Tensor(), 1 - rank), c10::ValueError);
    EXPECT_THROW(send(at::eye(2).to_sparse(), 1 - rank), c10::ValueError);
    EXPECT_THROW(recv(at::zeros({1}).expand({3}), 1 - rank), c10::ValueError) << "elements share memory";
    EXPECT_THROW(send(at::zeros({3, 2}).t(), 1 - rank), c10::ValueError) << "not contiguous, as in PyTorch";
    EXPECT_THROW(irecv(at::zeros({6}).slice(0, 0, 6, 2), 1 - rank), c10::ValueError);
    EXPECT_THROW(send(tensor, 1 - rank, {}, -1), c10::ValueError) << "negative tags are not for users";
    EXPECT_THROW(batch_isend_irecv({}), c10::ValueError);
    auto group = new_group();
    EXPECT_THROW(
        batch_isend_irecv({{Kind::kSend, tensor, 1 - rank, group}, {Kind::kReceive, tensor, 1 - rank}}),
        c10::ValueError)
        << "two groups";
    EXPECT_THROW(batch_isend_irecv({{Kind::kSend, tensor, 2}}), c10::ValueError);
    barrier();  // nothing of that was sent
  });
}

TEST(PointToPoint, WrongSizesAndTypesAreExplainedAndTheGroupGoesOn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    struct Mistake {
      at::Tensor sent, received;
      std::string one, other;
    };
    for (int64_t numel : {kSmall, kLarge}) {
      const std::string count = std::to_string(numel);
      for (const Mistake& mistake :
           {Mistake{at::ones({numel}), at::zeros({numel}, at::kInt), "elements of Float", "Int ["},
            Mistake{at::ones({numel}), at::zeros({numel + 1}), count + " elements",
                    std::to_string(numel + 1)},
            Mistake{at::ones({numel}), at::zeros({2}), count + " elements", "[2]"}}) {
        const at::Tensor before = mistake.received.clone();
        if (rank == 1) {
          const auto text = message_of([&] { recv(mistake.received, 0, {}, 4); });
          EXPECT_THAT(text, HasSubstr("rank 0 sent"));
          EXPECT_THAT(text, HasSubstr(mistake.one));
          EXPECT_THAT(text, HasSubstr(mistake.other));
          EXPECT_TRUE(at::equal(mistake.received, before));
        } else if (numel == kSmall) {
          send(mistake.sent, 1, {}, 4);  // has left before the receiver looks at it
        } else {
          EXPECT_THAT(message_of([&] { send(mistake.sent, 1, {}, 4); }), HasSubstr("rank 1 expects"));
        }
        // The message is gone; the next one with this tag arrives.
        at::Tensor right = at::full({numel}, 3 * (1 - rank), at::kInt);
        rank == 0 ? send(right, 1, {}, 4) : void(recv(right, 0, {}, 4));
        EXPECT_EQ(right.min().item<int>(), 3);
      }
    }
  });
}

/// What a profiler is told of scopes while one lives: how many there were, by name, and whether each ended in its thread
/// before those around it.
class Bars {
 public:
  Bars()
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::USER_SCOPE}))) {}
  ~Bars() { at::removeCallback(handle_); }
  int count(const std::string& name) {
    const std::lock_guard lock(mutex);
    return counts[name];
  }
  static int overlapping() { return overlaps; }

 private:
  struct Bar : at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto bar = std::make_unique<Bar>();
    open.push_back(bar.get());
    const std::lock_guard lock(mutex);
    ++counts[function.name()];
    return bar;
  }
  static void end(const at::RecordFunction& /*function*/, at::ObserverContext* bar) {
    if (open.empty() || open.back() != bar) ++overlaps;
    std::erase(open, bar);
  }

  static inline thread_local std::vector<at::ObserverContext*> open;
  static inline std::atomic<int> overlaps{0};
  static inline std::mutex mutex;
  static inline std::map<std::string, int> counts;
  at::CallbackHandle handle_;
};

TEST(PointToPoint, InAProfileTheBarsOfAThreadLieWithinOrBesideEachOther) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    constexpr int kMessages = 4;
    Bars bars;
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    const auto start = [&](auto&& way, int tag) {
      tensors.push_back(at::full({tag % 2 == 0 ? kSmall : kLarge}, rank, at::kInt));
      works.push_back(way(tensors.back(), 1 - rank, tag));
    };
    for (int tag = 0; tag < kMessages; ++tag) {
      start([](const at::Tensor& to, int src, int tag) { return irecv(to, src, {}, tag); }, tag);
    }
    for (int tag = kMessages; tag-- > 0;) {
      start([](const at::Tensor& from, int dst, int tag) { return isend(from, dst, {}, tag); }, tag);
    }
    for (const Work& work : works) work->wait();
    EXPECT_EQ(Bars::overlapping(), 0);
    EXPECT_EQ(bars.count("lockstep:recv"), kMessages);
    EXPECT_EQ(bars.count("lockstep:send"), kMessages);
  });
}

}  // namespace
}  // namespace lockstep::point_to_point_test

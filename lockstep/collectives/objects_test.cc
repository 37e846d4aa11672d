// Object collectives between processes. What single pickles may hold: object_pickle_test.cc.
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/serialization/object_conversion.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::objects_test {
namespace {

using c10::IValue;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using Objects = std::vector<IValue>;
using Counters = std::map<std::string, double>;

/// Different in kind and size on each rank: rank r's object holds r at its end.
IValue object_of(int rank) {
  return to_object(
      std::map<std::string, IValue>{{"text", std::string(static_cast<size_t>(rank) * 5000, 'x')},
                                    {"tensor", torch::arange(rank * 3).view({3, rank}).t()},
                                    {"nested", to_object(std::vector<Counters>{{{"rank", rank}}})}});
}

void expect_object_of(int rank, const IValue& object) {
  const auto parts = from_object<std::map<std::string, IValue>>(object);
  EXPECT_EQ(from_object<std::string>(parts.at("text")).size(), static_cast<size_t>(rank) * 5000);
  EXPECT_TRUE(
      torch::equal(from_object<at::Tensor>(parts.at("tensor")), torch::arange(rank * 3).view({3, rank}).t()));
  EXPECT_EQ(from_object<std::vector<Counters>>(parts.at("nested")),
            (std::vector<Counters>{{{"rank", rank}}}));
}

IValue unpicklable() {
  return at::make_generator<at::CPUGeneratorImpl>();
}

/// The group still works: no rank is still in an earlier call.
void expect_usable(int rank, int nprocs) {
  auto tensor = torch::full({1}, rank);
  all_reduce(tensor);
  EXPECT_EQ(tensor.item<int64_t>(), nprocs * (nprocs - 1) / 2);
}

/// `culprit` can't pickle its object: it gets the reason, the others its number.
void expect_named(int culprit, int rank, const std::function<void()>& call) {
  if (rank == culprit) {
    EXPECT_THAT(message_of<c10::ValueError>(call), HasSubstr("can't pickle the object"));
  } else {
    EXPECT_THAT(message_of<c10::DistBackendError>(call),
                HasSubstr("rank " + std::to_string(culprit) + " could not pickle the object to send"));
  }
}

TEST(Objects, AllGather) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Objects objects(3);
    all_gather_object(objects, object_of(rank));
    for (int r = 0; r < 3; ++r) expect_object_of(r, objects[static_cast<size_t>(r)]);
    EXPECT_EQ(all_gather_values(Counters{{"rank", rank}}),
              (std::vector<Counters>{{{"rank", 0}}, {{"rank", 1}}, {{"rank", 2}}}));
  });
}

TEST(Objects, GatherToAnyRank) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (int dst = 0; dst < 3; ++dst) {
      Objects objects(rank == dst ? 3 : 0);
      gather_object(object_of(rank), rank == dst ? &objects : nullptr, dst);
      for (int r = 0; r < 3 && rank == dst; ++r) expect_object_of(r, objects[static_cast<size_t>(r)]);
      gather_object(object_of(rank), &objects, dst);  // an empty list is none
    }
  });
}

TEST(Objects, Broadcast) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Objects objects = rank == 1 ? Objects{object_of(2), int64_t{7}, IValue()} : Objects{1.5, 1.5, 1.5};
    broadcast_object_list(objects, /*src=*/1);
    expect_object_of(2, objects[0]);
    EXPECT_EQ(from_object<int>(objects[1]), 7);
    EXPECT_TRUE(objects[2].isNone());
  });
}

TEST(Objects, Scatter) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Objects output{IValue(), "kept"};
    scatter_object_list(output, rank == 2 ? Objects{object_of(0), object_of(1), object_of(2)} : Objects{}, 2);
    expect_object_of(rank, output[0]);
    EXPECT_EQ(from_object<std::string>(output[1]), "kept");
  });
}

TEST(Objects, SendAndReceive) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    if (rank != 0) return send_object_list({object_of(rank), rank}, 0);
    Objects objects(2);
    EXPECT_EQ(recv_object_list(objects, 2), 2);
    expect_object_of(2, objects[0]);
    EXPECT_EQ(recv_object_list(objects), 1);  // from any rank
    expect_object_of(1, objects[0]);
    EXPECT_EQ(from_object<int>(objects[1]), 1);
  });
}

TEST(Objects, FromAnySourceDoesNotMixSenders) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (int round = 0; round < 20; ++round) {
      if (rank != 0)
        send_object_list({to_object(std::vector<int>(static_cast<size_t>(rank * 100), rank))}, 0);
      for (int i = 0; rank == 0 && i < 2; ++i) {
        Objects objects(1);
        const int sender = recv_object_list(objects);
        EXPECT_EQ(from_object<std::vector<int>>(objects[0]),
                  std::vector<int>(static_cast<size_t>(sender * 100), sender));
      }
    }
  });
}

TEST(Objects, TakeGlobalRanksInGroups) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group({1, 2});
    Objects objects(2);
    if (rank == 0) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { all_gather_object(objects, 1, group); }),
                  HasSubstr("all_gather_object: this rank is not a member of the group"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { all_gather_values(1, group); }),
                  HasSubstr("this rank is not a member of the group"));
      return;
    }
    gather_object(object_of(rank), rank == 2 ? &objects : nullptr, 2, group);
    if (rank == 2) expect_object_of(1, objects[0]), expect_object_of(2, objects[1]);
    Objects one{rank == 1 ? object_of(2) : IValue()};
    broadcast_object_list(one, 1, group);
    expect_object_of(2, one[0]);
    expect_named(2, rank, [&] { all_gather_object(objects, rank == 2 ? unpicklable() : IValue(1), group); });
  });
}

TEST(Objects, RefuseListsBeforeAnybodyWaits) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    // Only one rank calls at a time: a call that waited would never return.
    Objects none, one(1), two(2), three(3);
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { gather_object(1, &two, 0); }),
                  AllOf(HasSubstr("must NOT be specified on non-destination ranks"), HasSubstr("rank 0")));
      EXPECT_THAT(message_of<c10::ValueError>([&] { scatter_object_list(one, two, 0); }),
                  AllOf(HasSubstr("must NOT be specified on non-source ranks"), HasSubstr("rank 0")));
      EXPECT_THAT(message_of<c10::ValueError>([&] { recv_object_list(one, 1); }),
                  HasSubstr("invalid source rank"));
    } else {
      EXPECT_THAT(message_of<c10::ValueError>([&] { gather_object(1); }),
                  HasSubstr("object_gather_list must be specified on destination rank 0"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { gather_object(1, &none); }), HasSubstr("has 0 elements"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { gather_object(1, &three); }),
                  HasSubstr("object_gather_list has 3 elements, but the group has 2 ranks"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { scatter_object_list(one); }),
                  HasSubstr("scatter_object_input_list has 0 elements"));
      EXPECT_THAT(message_of<c10::ValueError>([&] { send_object_list(one, 0); }),
                  HasSubstr("invalid destination rank"));
    }
    EXPECT_THAT(message_of<c10::ValueError>([&] { all_gather_object(one, 1); }),
                HasSubstr("has 1 elements, but the group"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { scatter_object_list(none, two); }),
                HasSubstr("size at least 1"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { broadcast_object_list(none); }),
                HasSubstr("size at least 1"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { send_object_list(none, 1 - rank); }),
                HasSubstr("size at least 1"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { recv_object_list(none); }), HasSubstr("size at least 1"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { broadcast_object_list(one, 7); }), HasSubstr("7"));
    expect_usable(rank, 2);
  });
}

TEST(Objects, NameTheRankThatCantPickle) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const IValue object = rank == 1 ? unpicklable() : object_of(rank);
    Objects objects(3), output(1), both{object, object};
    expect_named(1, rank, [&] { all_gather_object(objects, object); });
    expect_named(1, rank, [&] { gather_object(object, rank == 2 ? &objects : nullptr, 2); });
    expect_named(1, rank, [&] { broadcast_object_list(both, 1); });
    expect_named(1, rank,
                 [&] { scatter_object_list(output, rank == 1 ? Objects(3, object) : Objects{}, 1); });
    if (rank < 2)
      expect_named(1, rank, [&] { rank == 1 ? send_object_list(both, 0) : (void)recv_object_list(both); });
    EXPECT_TRUE(objects[0].isNone()) << "a list is filled whole or not at all";
    expect_usable(rank, 3);
  });
}

TEST(Objects, KeepTheSizeLimit) {
  testing::RunRanksOptions options;
  options.environment = {{"LOCKSTEP_MAX_OBJECT_BYTES", "1000"}};
  const auto call = [](int rank) {
    auto world = init_process_group();
    Objects objects(2);
    const auto gather_all = [&] { all_gather_object(objects, std::string(rank == 1 ? 1000 : 10, 'x')); };
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::ValueError>(gather_all),
                  HasSubstr("(1000 bytes); send less or raise LOCKSTEP_MAX_OBJECT"));
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>(gather_all), HasSubstr("rank 1 could not pickle"));
    }
    // A peer that doesn't keep it.
    auto size = torch::full({1}, rank == 1 ? int64_t{1} << 50 : 4);
    if (rank == 1) return (void)all_gather({torch::empty(1, at::kLong), torch::empty(1, at::kLong)}, size);
    EXPECT_THAT(message_of<c10::DistBackendError>([&] { all_gather_object(objects, 1); }),
                HasSubstr("rank 1 announces an object of 1125899906842624 bytes; up to 1000 B are allowed"));
  };
  testing::run_ranks(2, call, options);
}

TEST(Objects, NameTheSenderOfBytesThatAreNoObject) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    if (rank == 0) {
      Objects objects{"before", "before"};
      EXPECT_THAT(
          message_of<c10::DistBackendError>([&] { all_gather_object(objects, std::string(60, 'x')); }),
          HasSubstr("all_gather_object: the object of rank 1 can't be read: byte 0, opcode 0x2a '*'"));
      EXPECT_EQ(from_object<std::string>(objects[0]), "before");
      objects.resize(1);
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { recv_object_list(objects); }),
                  HasSubstr("recv_object_list: the object of rank 1 can't be read: byte 0"));
    } else {  // the same operations, as all_gather_object makes them, with other contents
      std::vector<at::Tensor> sizes{torch::empty(1, at::kLong), torch::empty(1, at::kLong)};
      all_gather(sizes, torch::full({1}, 3));
      const int64_t largest = sizes[0].item<int64_t>();
      all_gather({torch::empty(largest, at::kByte), torch::empty(largest, at::kByte)},
                 torch::full({largest}, '*', at::kByte));
      send(torch::full({1}, 3), 0);
      send(torch::full({3}, '*', at::kByte), 0);
    }
    expect_usable(rank, 2);
  });
}

TEST(Objects, ConvertStandardTypes) {
  const std::map<int, std::vector<std::optional<double>>> nested{{-1, {0.5, std::nullopt}}, {2, {}}};
  EXPECT_EQ((from_object<std::map<int, std::vector<std::optional<double>>>>(to_object(nested))), nested);
  const std::tuple<std::string, bool, std::pair<float, uint8_t>> tuple{"a", true, {0.25F, 200}};
  EXPECT_EQ((from_object<std::tuple<std::string, bool, std::pair<float, uint8_t>>>(to_object(tuple))), tuple);
  EXPECT_EQ((from_object<std::array<int64_t, 2>>(to_object(std::pair<int, int>(3, 4)))),
            (std::array<int64_t, 2>{3, 4}));
  EXPECT_EQ((from_object<std::unordered_map<std::string, std::string>>(
                 to_object(std::map<std::string, std::string>{{"k", "v"}})))
                .at("k"),
            "v");
  EXPECT_EQ(from_object<std::vector<bool>>(to_object(std::vector<bool>{true, false})),
            (std::vector<bool>{true, false}));
  EXPECT_EQ(from_object<double>(to_object(3)), 3.0);
  EXPECT_EQ(from_object<std::vector<int>>(IValue(std::vector<int64_t>{1, 2})), (std::vector<int>{1, 2}));
}

TEST(Objects, RefuseConversionsThatDoNotFit) {
  const auto error = [](auto wanted, const IValue& object) {
    return message_of<c10::ValueError>([&] { from_object<decltype(wanted)>(object); });
  };
  EXPECT_THAT(error(int{}, 0.5), HasSubstr("an integer was wanted, but the object is of type Double"));
  EXPECT_THAT(error(uint8_t{}, 256), HasSubstr("256 is outside 0 to 255"));
  EXPECT_THAT(error(bool{}, 1), HasSubstr("a bool was wanted"));
  EXPECT_THAT(error(double{}, "0.5"), HasSubstr("a number was wanted"));
  EXPECT_THAT(error(std::string{}, IValue()),
              HasSubstr("a string was wanted, but the object is of type None"));
  EXPECT_THAT(error(at::Tensor{}, 1), HasSubstr("a tensor was wanted"));
  EXPECT_THAT(error(Counters{}, to_object(std::vector<int>{1})), HasSubstr("a dict was wanted"));
  EXPECT_THAT(error(std::vector<int>{}, to_object(Counters{})), HasSubstr("a list or tuple was wanted"));
  EXPECT_THAT(error(std::pair<int, int>{}, to_object(std::vector<int>{1})),
              HasSubstr("2 elements were wanted, but there are 1"));
  EXPECT_THAT(message_of<c10::ValueError>([] { to_object(std::numeric_limits<uint64_t>::max()); }),
              HasSubstr("does not fit"));
}

}  // namespace
}  // namespace lockstep::objects_test

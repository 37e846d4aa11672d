#include <string>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch::messages_test {
namespace {

const Status kStatus = {.id = {1, 2, 255},
                        .sent_at = -5,
                        .host = "node-a",
                        .node_rank = 3,
                        .nproc = 8,
                        .role = "trainer",
                        .options = "--nnodes=2",
                        .phase = HostPhase::kFailed,
                        .generation = 1ULL << 63,
                        .order = 77,
                        .exit_status = 75,
                        .leaving = 15,
                        .culprit = 3,
                        .failure = std::string("a\0b", 3),
                        .answers = 11,
                        .watches = true};
const Order kOrder = {.job = {9},
                      .number = 4,
                      .status_sent_at = 1LL << 62,
                      .command = Command::kRun,
                      .question = 12,
                      .watched = true,
                      .place = {5, 1, 2, 8, 16, 0, 3, 9},
                      .generation = 6,
                      .exit_status = 3,
                      .reason = "why"};

TEST(Messages, CanBeReadAgain) {
  EXPECT_EQ(decode_status(encode(kStatus)), kStatus);
  EXPECT_EQ(decode_order(encode(kOrder)), kOrder);
  for (const Command command : {Command::kIdle, Command::kEnd, Command::kYield}) {
    Order order = kOrder;
    order.command = command;
    EXPECT_EQ(decode_order(encode(order)), order);
  }
  EXPECT_EQ(decode_status(encode(kOrder)), std::nullopt);
  EXPECT_EQ(decode_order(encode(kStatus)), std::nullopt);
}

TEST(Messages, ReportsHaveABoundOfTheirOwn) {
  Report report = {.agent = {7}, .text = std::string(kMostMessageBytes, 'x')};
  EXPECT_EQ(decode_report(encode(report)), report);
  EXPECT_EQ(decode_report(encode(Report{})), Report{});
  EXPECT_EQ(decode_report(encode(Report{}).substr(1)), std::nullopt);
  EXPECT_EQ(decode_report(encode(kOrder)), std::nullopt);
  EXPECT_EQ(decode_status(encode(report)), std::nullopt);
  report.text = std::string(kMostReportBytes, 'x');
  EXPECT_EQ(decode_report(encode(report)), std::nullopt);
}

TEST(Messages, NoPartOfOneIsOne) {
  for (const std::string& bytes : {encode(kStatus), encode(kOrder)}) {
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_EQ(decode_status(bytes.substr(0, size)), std::nullopt) << size;
      EXPECT_EQ(decode_order(bytes.substr(0, size)), std::nullopt) << size;
    }
    EXPECT_EQ(decode_status(bytes + "x"), std::nullopt);
    EXPECT_EQ(decode_order(bytes + "x"), std::nullopt);
  }
}

TEST(Messages, NumbersHaveBounds) {
  for (const int32_t nproc : {0, -1, 65537}) {
    Status status = kStatus;
    status.nproc = nproc;
    EXPECT_EQ(decode_status(encode(status)), std::nullopt) << nproc;
  }
  for (const Place& place : {Place{1, 2, 2, 0, 2}, Place{1, 0, 1, 2, 2}, Place{1, -1, 1, 0, 1},
                             Place{1, 0, 0, 0, 1}, Place{1, 0, 1, 0, 1, 0, 1, 1}}) {
    Order order = kOrder;
    order.place = place;
    EXPECT_EQ(decode_order(encode(order)), std::nullopt);
  }
}

TEST(Messages, LongTextsAreCut) {
  Order order = kOrder;
  order.reason = std::string(100000, 'x');
  const std::string bytes = encode(order);
  EXPECT_LE(bytes.size(), kMostMessageBytes);
  EXPECT_EQ(decode_order(bytes).value_or(Order{}).reason, std::string(12000, 'x'));
}

TEST(Messages, LongReportsOfFailuresKeepTheirBeginAndEnd) {
  Status status = kStatus;
  status.failure = "rank 3 failed first" + std::string(100000, 'x') + "the ranks' last operations";
  const std::string bytes = encode(status);
  EXPECT_LE(bytes.size(), kMostMessageBytes);
  const std::string told = decode_status(bytes).value_or(Status{}).failure;
  EXPECT_EQ(told.size(), 12000U);
  EXPECT_TRUE(told.starts_with("rank 3 failed first") && told.ends_with("the ranks' last operations"));
  EXPECT_NE(told.find("x\n    …\nx"), std::string::npos);
  status.failure = std::string(12000, 'x');
  EXPECT_EQ(decode_status(encode(status)), status);
}

}  // namespace
}  // namespace lockstep::launch::messages_test

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/testing/gate.h>
#include <lockstep/transport/wire/thread_engine.h>
#include <lockstep/transport/wire/ucx_engine.h>
#include <lockstep/transport/wire/wire.h>

// Ranks of one process with a wire each, over each kind of engine.
namespace lockstep::transport::wire {

using Bytes = std::vector<uint8_t>;

constexpr WaitPolicy kSpin{200, 100, true};
constexpr WaitPolicy kSleep{};
constexpr size_t kLong = size_t{25} << 20;

/// Bytes that tell messages apart.
inline Bytes pattern(size_t bytes, uint32_t seed) {
  Bytes result(bytes);
  uint32_t state = seed * 2654435761u + 1;
  for (uint8_t& byte : result) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return result;
}

/// Makes the engines of ranks in this process.
class Engines {
 public:
  explicit Engines(const std::string& kind, int ranks) {
    if (kind == "Threads") hub_ = ThreadHub::make(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      made_.push_back(hub_ ? hub_->make_engine(rank) : make_ucx_engine(rank, {.interface = "lo"}));
    }
    for (auto& engine : made_) {
      for (int rank = 0; rank < ranks; ++rank) {
        if (made_[rank] != engine) engine->connect(rank, made_[rank]->address());
      }
    }
  }
  std::unique_ptr<Engine> take(int rank) { return std::move(made_[rank]); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  std::vector<std::unique_ptr<Engine>> made_;
};

/// A rank's wire, and what it has told.
struct Place {
  explicit Place(std::unique_ptr<Engine> engine)
      : wire(std::make_unique<Wire>(std::move(engine), [this](int rank, const std::string& reason) {
          lost_rank = rank;
          lost_reason = reason;
          ++losses;
          someone_lost.open();
        })) {}

  RequestStatus wait(const Handle& request, const WaitPolicy& policy = kSpin) {
    const auto ready = [&] { return request->done() || (wire->progress(), request->done()); };
    EXPECT_TRUE(wait_until(bell, policy, Deadline::after(std::chrono::seconds(60)), ready,
                           [&] { wire->before_sleep(); }));
    return request->status();
  }
  RequestStatus send(int to, Tag tag, const Bytes& data) {
    return wait(wire->send(to, tag, data.data(), data.size(), &bell));
  }
  /// Receives a message of so many bytes.
  Bytes receive(int from, Tag tag, size_t bytes) {
    Bytes result(bytes);
    const Handle request = wire->receive(from, tag, result.data(), bytes, &bell);
    EXPECT_EQ(wait(request), RequestStatus::kSucceeded);
    EXPECT_EQ(request->bytes(), bytes);
    return result;
  }

  Doorbell bell;
  testing::Gate someone_lost;
  std::atomic<int> losses{0};
  int lost_rank = -1;
  std::string lost_reason;
  std::unique_ptr<Wire> wire;
};

class Wires : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "Ucx" && !why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
  }
  std::vector<std::unique_ptr<Place>> make(int ranks) {
    Engines engines(GetParam(), ranks);
    std::vector<std::unique_ptr<Place>> places;
    for (int rank = 0; rank < ranks; ++rank) places.push_back(std::make_unique<Place>(engines.take(rank)));
    return places;
  }
};

}  // namespace lockstep::transport::wire

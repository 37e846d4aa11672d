#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/ranks.h>
#include <lockstep/flight/records.h>

// What a rank has called, recorded as it would be in a job.
namespace lockstep::flight::recorded_rank {

constexpr int64_t kSecond = 1'000'000'000;

/// One operation to record; made by the functions below.
struct Call {
  std::string operation;
  std::string detail = {};
  std::vector<int64_t> sizes = {4};
  int peer = -1;
  int tag = 0;
  bool message = false;
  bool asynchronous = false;
  int64_t at = 0;  // seconds; 0: one after the previous
  std::string purpose = {};
};
inline Call all_reduce(std::vector<int64_t> sizes = {4}) {
  return {.operation = "all_reduce", .detail = "SUM", .sizes = std::move(sizes)};
}
inline Call barrier() {
  return {.operation = "barrier", .sizes = {}};
}
inline Call broadcast(int root) {
  return {.operation = "broadcast", .peer = root};
}
inline Call send(int to, int tag = 0, std::vector<int64_t> sizes = {4}) {
  return {.operation = "send", .sizes = std::move(sizes), .peer = to, .tag = tag, .message = true};
}
inline Call recv(int from, int tag = 0) {
  return {.operation = "recv", .peer = from, .tag = tag, .message = true};
}
inline Call async(Call call) {
  call.asynchronous = true;
  return call;
}
inline Call in_bucket(Call call) {
  call.purpose = "DDP bucket 3 of 5";
  return call;
}
inline Call at(int64_t second, Call call) {
  call.at = second;
  return call;
}

/// Records one rank. Calls of rank R stand in rankR.cc, each on a line of its own.
class Rank {
 public:
  Rank(int rank, int world_size) {
    record_.rank = rank;
    record_.world_size = world_size;
    record_.pid = 1000 + rank;
    record_.host = "host";
    record_.boot_id = "boot";
    record_.program = "train";
    record_.reason = "timeout";
    record_.monotonic_ns = 100 * kSecond;
    record_.realtime_ns = 1000 * kSecond;
    record_.loaded_ns = 890 * kSecond;
    group("default", all_ranks(world_size));
  }

  /// What follows belongs to this group.
  Rank& group(const std::string& key, std::vector<int> ranks) {
    const GroupRecord wanted{key, key, std::move(ranks)};
    auto found = std::find(record_.groups.begin(), record_.groups.end(), wanted);
    if (found == record_.groups.end()) found = record_.groups.insert(found, wanted);
    group_ = static_cast<int>(found - record_.groups.begin());
    return *this;
  }
  Rank& done(const Call& call) { return add(call, State::kCompleted, ""); }
  Rank& done(int count, const Call& call) {
    for (int i = 0; i < count; ++i) done(call);
    return *this;
  }
  Rank& waits(const Call& call) { return add(call, State::kStarted, ""); }
  Rank& fails(const Call& call, const std::string& error) { return add(call, State::kFailed, error); }
  Rank& written_at(int64_t second) {
    record_.realtime_ns += second * kSecond - record_.monotonic_ns;
    record_.monotonic_ns = second * kSecond;
    return *this;
  }
  RankRecord& record() { return record_; }

 private:
  Rank& add(const Call& call, State state, const std::string& error) {
    time_ = call.at > 0 ? call.at : time_ + 1;
    Entry entry;
    entry.record_id = record_.entries.size() + 1;
    entry.group = group_;
    entry.operation = call.operation;
    entry.detail = call.detail;
    entry.point_to_point = call.message;
    entry.sequence = ++sequences_[{group_, call.message}];
    entry.peer = call.peer;
    entry.tag = call.tag;
    entry.asynchronous = call.asynchronous;
    if (!call.sizes.empty()) entry.inputs = {{call.sizes}, {"Float"}};
    entry.state = state;
    entry.created_ns = time_ * kSecond;
    if (!entry.pending()) entry.ended_ns = (state == State::kFailed ? 99 : time_) * kSecond + kSecond / 2;
    entry.error = error;
    entry.file = "rank" + std::to_string(record_.rank) + ".cc";
    entry.line = static_cast<int64_t>(entry.record_id);
    entry.purpose = call.purpose;
    record_.entries.push_back(entry);
    return *this;
  }

  RankRecord record_;
  int group_ = 0;
  int64_t time_ = 0;
  std::map<std::pair<int, bool>, uint64_t> sequences_;
};

}  // namespace lockstep::flight::recorded_rank

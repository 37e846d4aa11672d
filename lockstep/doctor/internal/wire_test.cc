#include <algorithm>
#include <chrono>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/doctor/internal/files.h>
#include <lockstep/doctor/internal/wire_test.h>

namespace lockstep::doctor::internal {
namespace {

using WireClock = std::chrono::steady_clock;

constexpr int kPings = 40;
constexpr int kFirstPings = 8;  // connect, and warm up
constexpr int64_t kChunkBytes = int64_t{256} << 10;
constexpr int64_t kMostChunks = 256;
constexpr int64_t kChunksUnderWay = 16;
constexpr double kStreamSeconds = 0.1;

int64_t wall_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

double seconds_since(WireClock::time_point begin) {
  return std::chrono::duration<double>(WireClock::now() - begin).count();
}

/// One rank's half of the test.
class WireTest {
 public:
  WireTest(const ProcessGroup& group, int peer, const std::function<void()>& begin_step)
      : group_(group), peer_(peer), begin_step_(begin_step) {}

  /// Half of a round trip, and the peer's clock against this one's, as NTP has it: by the fastest of the answers.
  void ask(WireMeasurement& measured) {
    std::vector<double> trips;
    double fastest = 0;
    for (int i = -kFirstPings; i < kPings; ++i) {
      const auto begin = WireClock::now();
      begin_step_();
      const int64_t asked = wall_ns();
      send(times_, peer_, group_);
      recv(times_, peer_, group_);
      const double trip = seconds_since(begin);
      const int64_t answered = wall_ns();
      if (i < 0) continue;
      trips.push_back(trip);
      if (fastest != 0 && trip >= fastest) continue;
      fastest = trip;
      const auto* theirs = times_.const_data_ptr<int64_t>();
      measured.clock_offset = 0.5e-9 * static_cast<double>((theirs[0] - asked) + (theirs[1] - answered));
    }
    std::nth_element(trips.begin(), trips.begin() + kPings / 2, trips.end());
    measured.latency = trips[kPings / 2] / 2;
  }

  void answer() {
    for (int i = -kFirstPings; i < kPings; ++i) {
      begin_step_();
      recv(times_, peer_, group_);
      auto* mine = times_.mutable_data_ptr<int64_t>();
      mine[0] = wall_ns();
      mine[1] = wall_ns();
      send(times_, peer_, group_);
    }
  }

  /// A first chunk tells how many more take long enough to be timed.
  void stream(WireMeasurement& measured) {
    const TcpSegments before = read_tcp_segments();
    double seconds = time_chunks(1);
    const auto more = static_cast<int64_t>(kStreamSeconds / std::max(seconds, 1e-6));
    const int64_t chunks = std::clamp<int64_t>(more, 1, kMostChunks);
    seconds = time_chunks(chunks);
    measured.rate = static_cast<double>(chunks * kChunkBytes) / std::max(seconds, 1e-9);
    const TcpSegments after = read_tcp_segments();
    measured.segments = after.sent - before.sent;
    measured.resent_segments = after.resent - before.resent;
  }

  void take_stream() {
    for (int stream = 0; stream < 2; ++stream) {
      begin_step_();
      recv(times_, peer_, group_);
      const int64_t chunks = times_.const_data_ptr<int64_t>()[0];
      for (int64_t i = 0; i < chunks; ++i) recv(chunk_, peer_, group_);
      send(times_, peer_, group_);
    }
  }

 private:
  /// Until the peer has them all.
  double time_chunks(int64_t chunks) {
    begin_step_();
    const auto begin = WireClock::now();
    times_.mutable_data_ptr<int64_t>()[0] = chunks;
    send(times_, peer_, group_);
    std::vector<Work> under_way;
    for (int64_t i = 0; i < chunks; ++i) {
      under_way.push_back(isend(chunk_, peer_, group_));
      if (i >= kChunksUnderWay) under_way[static_cast<size_t>(i - kChunksUnderWay)]->wait();
    }
    for (const Work& work : under_way) work->wait();
    recv(times_, peer_, group_);
    return seconds_since(begin);
  }

  const ProcessGroup& group_;
  int peer_;
  const std::function<void()>& begin_step_;
  at::Tensor times_ = at::zeros({2}, at::kLong);
  at::Tensor chunk_ = at::zeros({kChunkBytes}, at::kByte);
};

}  // namespace

TcpSegments read_tcp_segments() {
  // Two lines: "Tcp: RtoAlgorithm … OutSegs RetransSegs …", and the values.
  std::istringstream lines(read_kernel_file("/proc/self/net/snmp").value_or(""));
  std::string names;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("Tcp:")) continue;
    if (names.empty()) {
      names = line;
      continue;
    }
    TcpSegments segments;
    std::istringstream name_words(names);
    std::istringstream value_words(line);
    for (std::string name, value; name_words >> name && value_words >> value;) {
      if (name == "OutSegs") segments.sent = parse_number<int64_t>(value).value_or(0);
      if (name == "RetransSegs") segments.resent = parse_number<int64_t>(value).value_or(0);
    }
    return segments;
  }
  return {};
}

WireMeasurement measure_wire(const ProcessGroup& group, int rank, int peer,
                             const std::function<void()>& begin_step) {
  WireMeasurement measured;
  WireTest test(group, peer, begin_step);
  if (rank < peer) {
    test.ask(measured);
    test.stream(measured);
    test.take_stream();
  } else {
    test.answer();
    test.take_stream();
    test.stream(measured);
  }
  return measured;
}

}  // namespace lockstep::doctor::internal

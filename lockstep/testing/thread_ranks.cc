#include <algorithm>
#include <barrier>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/wire/thread_engine.h>

namespace lockstep::testing {

void run_rank_threads(int ranks,
                      const std::function<void(std::shared_ptr<transport::GroupChannel> channel)>& body,
                      const transport::HostTransport::Options& options) {
  const auto transports = transport::HostTransport::connect_threads(ranks, options);
  std::vector<int> members(ranks);
  std::iota(members.begin(), members.end(), 0);
  std::vector<uint64_t> addresses(ranks);
  std::barrier all_known(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto exchange = [&](uint64_t own) {
        addresses[rank] = own;
        all_known.arrive_and_wait();
        return addresses;
      };
      body(transport::GroupChannel::open(transports[rank], members, exchange,
                                         Deadline::after(std::chrono::seconds(60))));
    });
  }
  for (auto& thread : threads) thread.join();
}

void run_rank_threads(const std::vector<int>& host_of,
                      const std::function<void(std::shared_ptr<transport::GroupChannel> channel)>& body,
                      transport::HostTransport::Options options) {
  const auto ranks = static_cast<int>(host_of.size());
  const auto hub = transport::wire::ThreadHub::make(ranks);
  options.host_of = host_of;
  const int last = *std::max_element(host_of.begin(), host_of.end());
  for (int host = 0; host <= last; ++host) options.host_names.push_back("host-" + std::to_string(host));
  options.make_engine = [hub](int rank) { return hub->make_engine(rank); };
  run_rank_threads(ranks, body, options);
}

}  // namespace lockstep::testing

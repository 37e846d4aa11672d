#include <algorithm>
#include <arpa/inet.h>
#include <chrono>
#include <cstdlib>
#include <netinet/in.h>
#include <random>
#include <string>
#include <sys/socket.h>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <lockstep/base/ranks.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/testing/survivors.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::testing {

c10::intrusive_ptr<c10d::Store> launcher_store() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

c10::intrusive_ptr<c10d::Store> store_in_rank_0(int rank) {
  const auto meeting = launcher_store();
  c10d::TCPStoreOptions options;
  options.waitWorkers = false;
  if (rank == 0) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    TORCH_CHECK(::bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                ::listen(listener, 16) == 0 &&
                ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    options.isServer = true;
    options.port = ntohs(address.sin_port);
    options.masterListenFd = listener;  // the store closes it
    auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const std::string port = std::to_string(options.port);
    meeting->set("port of rank 0", std::vector<uint8_t>(port.begin(), port.end()));
    return store;
  }
  const auto port = meeting->get("port of rank 0");
  options.port = static_cast<uint16_t>(std::stoi(std::string(port.begin(), port.end())));
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

void die_soon(uint64_t seed) {
  std::thread([seed] {
    std::mt19937_64 random(seed);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    die();
  }).detach();
}

void go_on_until(int size) {
  while (true) {
    try {
      barrier();
      if (get_world_size() == size) return;
    } catch (const c10::DistBackendError&) {
      shrink_group();
    }
  }
}

at::Tensor numbers_of(int job_rank, int64_t numel) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(job_rank) + 1);
  return at::randn({numel}, generator);
}

at::Tensor sum_of(const std::vector<int>& job_ranks, int64_t numel) {
  at::Tensor sum = numbers_of(job_ranks.front(), numel);
  for (size_t i = 1; i < job_ranks.size(); ++i) sum = sum + numbers_of(job_ranks[i], numel);
  return sum;
}

void expect_whole_world(int job_rank, const std::vector<int>& members) {
  const auto place = std::find(members.begin(), members.end(), job_rank);
  const int rank = static_cast<int>(place - members.begin());
  const int size = static_cast<int>(members.size());
  const std::vector<int> group_ranks = all_ranks(size);
  EXPECT_EQ(get_rank(), rank);
  EXPECT_EQ(get_world_size(), size);
  EXPECT_EQ(get_process_group_ranks(), group_ranks);
  EXPECT_EQ(world_defaults()->rank, rank);
  EXPECT_EQ(world_defaults()->world_size, size);
  const auto bits_of = [](const std::vector<int>& ranks) {
    int64_t bits = 0;
    for (const int each : ranks) bits |= int64_t{1} << each;
    return bits;
  };
  const bool over_hosts = lockstep_backend_of(*default_group())->spans_hosts();
  for (const int64_t numel : {5, 100'000, 600'000}) {
    // Over hosts the order of summation is another one, which integers don't tell.
    at::Tensor tensor =
        over_hosts ? at::full({numel}, bits_of({job_rank}), at::kLong) : numbers_of(job_rank, numel);
    all_reduce(tensor);
    const at::Tensor expected =
        over_hosts ? at::full({numel}, bits_of(members), at::kLong) : sum_of(members, numel);
    EXPECT_TRUE(at::equal(tensor, expected)) << numel << " elements";
  }
  std::vector<c10::IValue> job_ranks(members.size());
  all_gather_object(job_ranks, int64_t{job_rank});
  for (int i = 0; i < size; ++i) EXPECT_EQ(job_ranks[i].toInt(), members[i]);

  // Groups of the new world, by all and by splitting.
  const auto all = new_group();
  barrier(all);
  const auto first = new_group({0});
  EXPECT_EQ(is_member(first), rank == 0);
  if (size < 2) return;
  if (over_hosts) barrier(new_group(group_ranks, {}, {.use_local_synchronization = true}));  // in the store
  const auto ends = new_group({0, size - 1});
  const auto halves = split_group({}, {{0}, size > 2 ? std::vector<int>{1, 2} : std::vector{1}});
  for (const auto& group : {ends, halves}) {
    if (!is_member(group)) continue;
    at::Tensor tensor = at::full({1}, bits_of({job_rank}), at::kLong);
    all_reduce(tensor, ReduceOp::SUM, group);
    std::vector<int> job_ranks_there;
    for (const int member : get_process_group_ranks(group)) job_ranks_there.push_back(members[member]);
    EXPECT_EQ(tensor.item<int64_t>(), bits_of(job_ranks_there));
  }
  at::Tensor message = at::full({1}, 7);
  if (rank == 0) send(message, size - 1);
  if (rank == size - 1) {
    message.zero_();
    recv(message, 0);
    EXPECT_EQ(message.item<float>(), 7);
  }
  monitored_barrier();
}

}  // namespace lockstep::testing

#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/hosts/slice_exchange.h>
#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/host/testing/failure_of.h>

/// Operations over pretended hosts, with ranks as threads of one process, where ThreadSanitizer sees all sides.
namespace lockstep::collectives::internal::algorithms::hosts {

inline Terms terms() {
  return {.deadline = Deadline::after(std::chrono::seconds(300))};
}

/// By rank: on which host it is.
using Hosts = std::vector<int>;

inline Hosts one_rank_each(int hosts) {
  Hosts all;
  for (int host = 0; host < hosts; ++host) all.push_back(host);
  return all;
}

inline void on_ranks(const Hosts& hosts, const std::function<void(transport::GroupChannel&)>& body) {
  lockstep::testing::run_rank_threads(
      hosts, [&](const std::shared_ptr<transport::GroupChannel>& channel) { body(*channel); });
}

/// What the failure says that `call` must meet, after a barrier, whose end may meet it already.
inline std::string failure_of(transport::GroupChannel& channel, const std::function<void()>& call,
                              transport::FailureKind kind) {
  return transport::failure_of(
      [&] {
        hosts::barrier(channel, terms());
        call();
      },
      kind);
}

/// The texts of the mismatches that all ranks must meet in `call`, and again after it.
inline std::set<std::string> mismatch_texts(const Hosts& hosts,
                                            const std::function<void(transport::GroupChannel&)>& call) {
  constexpr auto kMismatch = transport::FailureKind::kMismatch;
  std::mutex mutex;
  std::set<std::string> texts;
  on_ranks(hosts, [&](transport::GroupChannel& channel) {
    const std::string text = failure_of(
        channel, [&] { call(channel); }, kMismatch);
    EXPECT_EQ(transport::failure_of([&] { hosts::barrier(channel, terms()); }, kMismatch), text);
    std::lock_guard lock(mutex);
    texts.insert(text);
  });
  return texts;
}

struct SmallChunks {
  explicit SmallChunks(size_t bytes) { set_chunk_bytes_for_testing(bytes); }
  SmallChunks(const SmallChunks&) = delete;
  SmallChunks& operator=(const SmallChunks&) = delete;
  ~SmallChunks() { set_chunk_bytes_for_testing(before); }
  const size_t before = chunk_bytes();
};

struct Forced {
  explicit Forced(HostAlgorithm algorithm) { force_host_algorithm_for_testing(algorithm); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
  ~Forced() { force_host_algorithm_for_testing(std::nullopt); }
};

/// A copy of a tensor in the arena, or outside, where the peers can't see it.
inline at::Tensor placed(transport::GroupChannel& channel, const at::Tensor& tensor, bool in_arena) {
  if (!in_arena) return tensor.clone();
  auto arena = channel.transport().shared_arena();
  std::byte* memory = arena->allocate(std::max<size_t>(tensor.nbytes(), 1));
  at::Tensor copy = at::from_blob(
      memory, tensor.sizes(), [arena](void* data) { arena->deallocate(data); }, tensor.options());
  copy.copy_(tensor);
  return copy;
}

/// On which ranks tensors lie in the arena; kMixed: on every other one.
enum class Memory { kArena, kElsewhere, kMixed };

inline at::Tensor placed(transport::GroupChannel& channel, const at::Tensor& tensor, Memory memory) {
  return placed(channel, tensor,
                memory == Memory::kArena || (memory == Memory::kMixed && channel.rank() % 2 == 0));
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

}  // namespace lockstep::collectives::internal::algorithms::hosts

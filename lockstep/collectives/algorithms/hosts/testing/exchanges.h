#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/hosts/testing/pretended_hosts.h>

/// Exchanges over pretended hosts, and what they bring.
namespace lockstep::collectives::internal::algorithms::hosts {

/// What exchanges are tested over.
inline const std::vector<Hosts> kHosts = {
    {0, 0, 1, 1},       {0, 1, 1, 1},       {0, 0, 1},    {0, 1, 2, 3},
    {1, 0, 1, 0, 0, 2}, {0, 1, 2, 0, 1, 2}, {0, 0, 0, 1}, {0, 1, 2, 3, 4, 5, 6, 7}};

/// Memory in the arena or outside, with what `from` gives to `to`.
class Content {
 public:
  Content(transport::GroupChannel& channel, int from, int to, size_t bytes, bool in_arena)
      : arena_(channel.transport().shared_arena()), in_arena_(in_arena), bytes_(bytes) {
    data_ = in_arena ? arena_->allocate(bytes) : new std::byte[bytes + 1];
    for (size_t i = 0; i < bytes; ++i) data_[i] = at(from, to, i);
  }
  Content(const Content&) = delete;
  Content& operator=(const Content&) = delete;
  ~Content() {
    if (in_arena_) {
      arena_->deallocate(data_);
    } else {
      delete[] data_;
    }
  }
  static std::byte at(int from, int to, size_t i) {
    return static_cast<std::byte>(
        mix_bits(static_cast<uint64_t>(from) << 40 ^ static_cast<uint64_t>(to + 1) << 32 ^ i));
  }
  static std::vector<std::byte> of(int from, int to, size_t bytes) {
    std::vector<std::byte> content(bytes);
    for (size_t i = 0; i < bytes; ++i) content[i] = at(from, to, i);
    return content;
  }
  Piece piece() const { return {data_, bytes_}; }

 private:
  std::shared_ptr<transport::Arena> arena_;
  bool in_arena_;
  size_t bytes_;
  std::byte* data_;
};

/// Runs an exchange and puts together what has come, by rank.
inline std::vector<std::vector<std::byte>> run_exchange(transport::GroupChannel& channel,
                                                        const Signature& signature, const Exchange& what) {
  std::vector<std::vector<std::byte>> all;
  for (const size_t bytes : what.takes) all.emplace_back(bytes);
  hosts::exchange(channel, terms(), signature, what, [&](const std::vector<Window>& windows) {
    ASSERT_EQ(windows.size(), all.size());
    for (size_t from = 0; from < windows.size(); ++from) {
      const Window& window = windows[from];
      for (size_t other = 0; other < from; ++other) {
        if (all[other].size() != all[from].size()) continue;
        EXPECT_EQ(windows[other].offset, window.offset);
        EXPECT_EQ(windows[other].bytes, window.bytes);
      }
      ASSERT_LE(window.offset + window.bytes, all[from].size());
      if (window.bytes > 0) std::memcpy(all[from].data() + window.offset, window.data, window.bytes);
    }
  });
  return all;
}

inline Signature signature_of(CollectiveKind kind, int root = -1) {
  Signature signature = Signature::of_dtype(kind, at::kByte);
  signature.root = root;
  return signature;
}

}  // namespace lockstep::collectives::internal::algorithms::hosts

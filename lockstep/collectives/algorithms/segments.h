#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/algorithms/exchange.h>

namespace lockstep::collectives::internal {

/// Where to put what an exchange brings from each rank: one after the other into any number of pieces of
/// memory.
class Segments {
 public:
  explicit Segments(int ranks) : from_(ranks) {}

  void add(int from, std::byte* data, size_t bytes) { from_[from].push_back({data, bytes}); }
  void add(int from, const at::Tensor& tensor) {
    add(from, static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes());
  }
  algorithms::Consume consumer() && {
    return [from_ranks = std::move(from_)](const std::vector<algorithms::Window>& windows) {
      for (size_t from = 0; from < windows.size(); ++from) put(from_ranks[from], windows[from]);
    };
  }

 private:
  struct Segment {
    std::byte* data;
    size_t bytes;
  };
  static void put(const std::vector<Segment>& segments, algorithms::Window window);

  std::vector<std::vector<Segment>> from_;
};

}  // namespace lockstep::collectives::internal

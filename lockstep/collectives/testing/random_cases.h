#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/testing/guarded_tensor.h>
#include <lockstep/testing/long_run.h>

/// Random calls of every operation of functional.h, and what a single process computes for them.
///
/// A Case says everything that the ranks of a call must agree on; all draw it alike from one seed, and each
/// can compute every rank's inputs, so each knows its own results without any communication.
namespace lockstep::testing {

struct Case;

/// Where a rank stands: in a process group (functional.h), or with ranks as threads, where there are no
/// process groups, with its backend alone.
struct Place {
  int rank = 0;
  ProcessGroup group;  // with `members`, its global ranks; or …
  std::vector<int> members;
  c10::intrusive_ptr<c10d::Backend> backend;  // … this
  /// Where this rank's tensors may be, all of a call on one; empty: on the CPU.
  std::vector<c10::Device> devices = {};
  bool sparse_on_devices = false;

  SharedMemory shared_memory() const;
};

/// A case in one rank's hands.
struct Call {
  const Case& c;
  const Place& place;
  std::vector<at::Tensor> tensors;  // in the order of Operation::slots

  int rank() const { return place.rank; }
  int global(int rank) const { return place.members.at(static_cast<size_t>(rank)); }
  std::vector<at::Tensor> range(size_t begin, size_t count) const;
  ReduceOp reduction() const;
};

/// A call that was made: what to wait for, and what to check then beside the tensors.
struct Started {
  std::vector<Work> works = {};
  std::function<void()> check = {};
};

/// One operation: how to call it, and what is expected.
struct Operation {
  struct Traits {
    bool reduces = false;    // takes a reduce operation
    bool rooted = false;     // takes a source or destination
    bool coalesced = false;  // takes several tensors
    bool splits = false;     // sizes differ by pair of ranks
    bool sparse = false;
    bool point_to_point = false;  // takes no part in the order of the collectives
    bool tensors = true;
  };

  const char* name;
  Traits traits;
  /// The tensors of `rank`.
  std::vector<Slot> (*slots)(const Case& c, int rank);
  Started (*call)(Call& call);          // by functional.h
  Started (*call_backend)(Call& call);  // by c10d::Backend; returned works are to be waited for
};

/// Every operation of functional.h.
const std::vector<Operation>& operations();
const Operation& operation_named(const std::string& name);

struct Case {
  const Operation* operation = nullptr;
  uint64_t seed = 0;  // of the data
  int ranks = 1;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::vector<int64_t>> parts;  // sizes of the tensors: one, or several for the coalesced forms
  ReduceOp::RedOpType reduction = ReduceOp::SUM;
  bool rounds = false;  // floating-point values for which the order of additions counts
  bool stacked =
      false;  // all_gather_into_tensor and reduce_scatter_tensor: a dimension more, not a longer one
  std::vector<std::vector<int64_t>> rows;  // all_to_all: [from][to]
  bool even = false;                       // all_to_all_single without split sizes
  int root = 0;
  int peer = 0;  // point to point: root sends to it
  int tag = 0;
  bool any_source = false;
  bool asynchronous = false;

  /// "all_reduce_coalesced of Float [61, 43] [7], AVG, 3 ranks, asynchronous, data seed 42"
  std::string describe() const;
};

/// Draws a case. The same generator state gives the same case on all ranks.
Case random_case(Random& random, const Operation& operation, int ranks);

/// What `rank` contributes: its `index`-th tensor of the case.
at::Tensor contribution(const Case& c, int rank, int64_t index, at::IntArrayRef sizes);
/// The same for all ranks.
std::vector<at::Tensor> contributions(const Case& c, int64_t index, at::IntArrayRef sizes);
/// Whether a reduce operation takes the dtype.
bool is_reducible(at::ScalarType dtype, ReduceOp::RedOpType reduction);
/// The case's reduction of the ranks' tensors, by torch's own operations, rank after rank; bfloat16 and
/// float16 in float32, complex numbers as pairs.
at::Tensor fold(const Case& c, std::vector<at::Tensor> tensors);
/// PREMUL_SUM's factor of a rank.
double premul_factor(const Case& c, int rank);

/// The seed of this test run: LOCKSTEP_TEST_SEED, else a fresh one in long runs (scripts/test --all), else 1.
/// Ranks must be given it in their environment, as seed_environment() does.
uint64_t test_seed();
std::vector<std::pair<std::string, std::optional<std::string>>> seed_environment(uint64_t seed);

}  // namespace lockstep::testing

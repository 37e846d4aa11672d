#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

// Jobs some of whose ranks are killed, and what those that are left must be able to do.
namespace lockstep::testing {

/// Kills its own process after a random while.
void die_soon(uint64_t seed);

/// The store of the process that started the ranks.
c10::intrusive_ptr<c10d::Store> launcher_store();

/// A store that ends with rank 0, as where no launcher holds one.
c10::intrusive_ptr<c10d::Store> store_in_rank_0(int rank);

/// Shrinks whenever the default group fails, until an operation succeeds in a group of `size`.
void go_on_until(int size);

/// Numbers whose sum depends on the order of summation.
at::Tensor numbers_of(int job_rank, int64_t numel);

/// What all_reduce must give: rank after rank.
at::Tensor sum_of(const std::vector<int>& job_ranks, int64_t numel);

/// All that a program may do with a default group, among the job's ranks `members`.
void expect_whole_world(int job_rank, const std::vector<int>& members);

}  // namespace lockstep::testing

// The examples of docs/reference/groups.md.
#include <chrono>
#include <iostream>

#include <lockstep/lockstep.h>

#include "examples.h"

namespace reference {
namespace {

void init_options() {
  // [InitOptions]
  lockstep::InitOptions options;
  options.timeout = std::chrono::minutes(5);
  options.group_name = "training";
  // [end]
  expect(options.rank == -1 && options.backend.empty());
}

void init_process_group() {
  // [init_process_group]
  auto world = lockstep::init_process_group({.timeout = std::chrono::minutes(5)});
  std::cout << "rank " << world.rank() << " of " << world.size() << std::endl;
  // [end]
  expect(world.size() == lockstep::get_world_size());
  // [destroy_process_group]
  lockstep::destroy_process_group();  // earlier than the end of `world`'s scope; that does nothing then
  // [end]
  expect(!lockstep::is_initialized());
}

void new_group(int rank) {
  // [new_group]
  auto evens = lockstep::new_group({0, 2}, std::chrono::minutes(1), {.group_desc = "evens"});
  auto tensor = torch::full({1}, 1.0 * rank);
  if (lockstep::is_member(evens)) lockstep::all_reduce(tensor, lockstep::ReduceOp::SUM, evens);
  lockstep::destroy_process_group(evens);
  // [end]
  expect_values(tensor, {rank % 2 == 0 ? 2.0 : 1.0 * rank});
}

void subgroups(int rank) {
  // [new_subgroups]
  auto [mine, all] = lockstep::new_subgroups(/*group_size=*/2);  // ranks 0 and 1, ranks 2 and 3
  auto tensor = torch::full({1}, 1.0 * rank);
  lockstep::all_reduce(tensor, lockstep::ReduceOp::SUM, mine);  // 1 or 5
  // [end]
  expect_values(tensor, {rank < 2 ? 1.0 : 5.0});
  expect(all.size() == 2);
}

void subgroups_by_enumeration(int rank) {
  // [new_subgroups_by_enumeration]
  auto [column, columns] = lockstep::new_subgroups_by_enumeration({{0, 2}, {1, 3}});
  // [end]
  expect(lockstep::get_rank(column) == rank / 2 && columns.size() == 2);
}

void split_group(int rank) {
  // [split_group]
  auto half = lockstep::split_group(lockstep::default_group(), {{0, 1}, {2, 3}});
  // [end]
  expect(lockstep::get_rank(half) == rank % 2);
}

void shrink_group(int rank) {
  // [shrink_group, ShrinkFlags]
  auto group = lockstep::new_group();
  auto tensor = torch::full({1}, 1.0 * rank);
  if (rank < 3) {  // rank 3 lives, and does not call it
    auto smaller = lockstep::shrink_group(/*ranks_to_exclude=*/{3}, group, lockstep::SHRINK_ABORT);
    lockstep::all_reduce(tensor, lockstep::ReduceOp::SUM, smaller);
  }
  // [end]
  expect_values(tensor, {3.0});
}

void asking(int rank) {
  // [get_rank, get_world_size]
  const int me = lockstep::get_rank(), ranks = lockstep::get_world_size();
  // [end]
  expect(me == rank && ranks == 4);
  // [get_node_local_rank]
  const int local_rank = lockstep::get_node_local_rank(/*fallback_rank=*/0);
  // [end]
  expect(local_rank == rank);
  // [is_member, default_group]
  const auto world = lockstep::default_group();
  TORCH_CHECK(lockstep::is_member(world) && world->getGroupName() == "default");
  // [end]
  auto last = lockstep::new_group({2, 3});
  // [get_group_rank, get_global_rank, get_process_group_ranks]
  TORCH_CHECK(lockstep::get_group_rank(world, 3) == 3 && lockstep::get_global_rank(world, 0) == 0);
  const std::vector<int> in_order = lockstep::get_process_group_ranks();  // 0, 1, 2, 3
  // [end]
  expect(in_order == std::vector<int>{0, 1, 2, 3});
  if (lockstep::is_member(last)) expect(lockstep::get_group_rank(last, 3) == 1);
  // [get_topology]
  const auto topology = lockstep::get_topology();
  const bool over_hosts = topology.spans_hosts();
  const std::vector<int>& ranks_here = topology.neighbours();
  // [end]
  expect(!over_hosts && ranks_here.size() == 4);

  // [get_backend, get_backend_config, get_default_backend_for_device]
  TORCH_CHECK(lockstep::get_backend() == "lockstep" &&
              lockstep::get_backend_config() == "cpu:lockstep,cuda:lockstep");
  TORCH_CHECK(lockstep::get_default_backend_for_device(torch::kCPU) == "lockstep");
  // [end]
  // [is_available, is_initialized, is_backend_available, is_nccl_available, is_torchelastic_launched]
  TORCH_CHECK(lockstep::is_available() && lockstep::is_initialized());
  TORCH_CHECK(lockstep::is_backend_available("lockstep") && !lockstep::is_backend_available("mpi"));
  TORCH_CHECK(lockstep::is_backend_available("cpu:lockstep,cuda:nccl") == lockstep::is_nccl_available());
  const bool has_launcher = lockstep::is_torchelastic_launched();  // true under lockstep run and torchrun
  // [end]
  expect(has_launcher);
  // [get_pg_count, get_debug_level]
  const int groups = lockstep::get_pg_count();
  const bool verbose = lockstep::get_debug_level() != c10d::DebugLevel::Off;
  // [end]
  expect(groups > 1);
  (void)verbose;
}

void set_group_timeout() {
  // [set_group_timeout]
  lockstep::set_group_timeout(std::chrono::minutes(2));
  // [end]
}

void empty_shared() {
  // [empty_shared]
  auto tensor = lockstep::empty_shared({1024, 1024}, torch::kFloat);
  tensor.fill_(1);
  lockstep::all_reduce(tensor);  // reduced where it lies
  // [end]
  expect(tensor.eq(4).all().item<bool>());
}

}  // namespace

void starting() {
  init_options();
  init_process_group();
}

void groups(int rank) {
  new_group(rank);
  subgroups(rank);
  subgroups_by_enumeration(rank);
  split_group(rank);
  shrink_group(rank);
  asking(rank);
  set_group_timeout();
  empty_shared();
}

}  // namespace reference

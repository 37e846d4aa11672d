#include <numeric>

#include <ATen/ops/cat.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/testing/operation_slots.h>
#include <lockstep/collectives/testing/random_cases.h>

// The table of operations: how each is called, once by functional.h and once by c10d::Backend.
namespace lockstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

/// Options of a backend's call; a default timeout is the group's.
template <class Options>
Options options_of(const Call& call) {
  Options options;
  options.asyncOp = call.c.asynchronous;
  if constexpr (requires { options.reduceOp; }) options.reduceOp = call.reduction();
  if constexpr (requires { options.rootRank; }) options.rootRank = call.c.root;
  return options;
}

Started started(const Work& work) {
  return work ? Started{{work}} : Started{};
}

struct Splits {
  Sizes sent, received;
};
Splits splits_of(const Call& call) {
  Splits splits;
  if (call.c.even) return splits;
  for (int peer = 0; peer < call.c.ranks; ++peer) {
    splits.sent.push_back(call.c.rows[static_cast<size_t>(call.rank())][static_cast<size_t>(peer)]);
    splits.received.push_back(call.c.rows[static_cast<size_t>(peer)][static_cast<size_t>(call.rank())]);
  }
  return splits;
}

/// The outputs of an all_gather as one list for each part.
std::vector<Tensors> by_part(const Call& call) {
  std::vector<Tensors> lists;
  const auto ranks = static_cast<size_t>(call.c.ranks);
  for (size_t part = 0; part < call.c.parts.size(); ++part) {
    lists.push_back(call.range(call.c.parts.size() + part * ranks, ranks));
  }
  return lists;
}

/// The same as one list for each rank.
std::vector<Tensors> by_rank(const Call& call) {
  std::vector<Tensors> lists(static_cast<size_t>(call.c.ranks));
  for (const Tensors& part : by_part(call)) {
    for (size_t rank = 0; rank < lists.size(); ++rank) lists[rank].push_back(part[rank]);
  }
  return lists;
}

// ---- Point to point: root sends to peer, the others look on.

Started call_send(Call& call) {
  const Case& c = call.c;
  if (call.tensors.empty()) return {};
  const std::optional<int> source = c.any_source ? std::nullopt : std::optional(call.global(c.root));
  if (call.rank() == c.root) {
    if (c.asynchronous) return {{isend(call.tensors[0], call.global(c.peer), call.place.group, c.tag)}};
    send(call.tensors[0], call.global(c.peer), call.place.group, c.tag);
    return {};
  }
  if (!c.asynchronous) {
    EXPECT_EQ(recv(call.tensors[0], source, call.place.group, c.tag), call.global(c.root)) << c.describe();
    return {};
  }
  Work work = irecv(call.tensors[0], source, call.place.group, c.tag);
  return {{work}, [work, root = c.root] { EXPECT_EQ(work->sourceRank(), root); }};
}

Started call_backend_send(Call& call) {
  const Case& c = call.c;
  if (call.tensors.empty()) return {};
  if (call.rank() == c.root) return {{call.place.backend->send(call.tensors, c.peer, c.tag)}};
  Work work = c.any_source ? call.place.backend->recvAnysource(call.tensors, c.tag)
                           : call.place.backend->recv(call.tensors, c.root, c.tag);
  return {{work}, [work, root = c.root] { EXPECT_EQ(work->sourceRank(), root); }};
}

Started call_batch(Call& call) {
  if (call.tensors.empty()) return {};
  const auto [ahead, behind] = neighbours(call.c, call.rank());
  const ProcessGroup& group = call.place.group;
  std::vector<P2POp> batch{{P2POp::Kind::kSend, call.tensors[0], call.global(ahead), group, call.c.tag},
                           {P2POp::Kind::kReceive, call.tensors[1], call.global(behind), group, call.c.tag}};
  if ((call.c.seed + static_cast<uint64_t>(call.rank())) % 2 == 0) std::swap(batch[0], batch[1]);
  return {batch_isend_irecv(batch)};
}

Started call_backend_batch(Call& call) {
  if (call.tensors.empty()) return {};
  const auto [ahead, behind] = neighbours(call.c, call.rank());
  Tensors sent{call.tensors[0]}, received{call.tensors[1]};
  return {{call.place.backend->send(sent, ahead, call.c.tag),
           call.place.backend->recv(received, behind, call.c.tag)}};
}

}  // namespace

const std::vector<Operation>& operations() {
  static const std::vector<Operation> kOperations = {
      {"all_reduce",
       {.reduces = true},
       all_reduce_slots,
       [](Call& k) {
         return started(all_reduce(k.tensors[0], k.reduction(), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         return started(k.place.backend->allreduce(k.tensors, options_of<c10d::AllreduceOptions>(k)));
       }},
      {"all_reduce_coalesced",
       {.reduces = true, .coalesced = true},
       all_reduce_slots,
       [](Call& k) {
         return started(all_reduce_coalesced(k.tensors, k.reduction(), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         return started(
             k.place.backend->allreduce_coalesced(k.tensors, options_of<c10d::AllreduceCoalescedOptions>(k)));
       }},
      {"all_reduce of sparse tensors",
       {.sparse = true},
       sparse_slots,
       [](Call& k) {
         return started(all_reduce(k.tensors[0], ReduceOp::SUM, k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         return started(k.place.backend->allreduce(k.tensors, options_of<c10d::AllreduceOptions>(k)));
       }},
      {"reduce",
       {.reduces = true, .rooted = true},
       reduce_slots,
       [](Call& k) {
         return started(
             reduce(k.tensors[0], k.global(k.c.root), k.reduction(), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         return started(k.place.backend->reduce(k.tensors, options_of<c10d::ReduceOptions>(k)));
       }},
      {"broadcast",
       {.rooted = true},
       broadcast_slots,
       [](Call& k) {
         return started(broadcast(k.tensors[0], k.global(k.c.root), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         return started(k.place.backend->broadcast(k.tensors, options_of<c10d::BroadcastOptions>(k)));
       }},
      {"all_gather",
       {},
       all_gather_slots,
       [](Call& k) {
         return started(all_gather(by_part(k)[0], k.tensors[0], k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto outputs = by_part(k);
         auto inputs = k.range(0, 1);
         return started(k.place.backend->allgather(outputs, inputs, options_of<c10d::AllgatherOptions>(k)));
       }},
      {"all_gather_into_tensor",
       {},
       all_gather_into_slots,
       [](Call& k) {
         return started(all_gather_into_tensor(k.tensors[1], k.tensors[0], k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         return started(k.place.backend->_allgather_base(k.tensors[1], k.tensors[0],
                                                         options_of<c10d::AllgatherOptions>(k)));
       }},
      {"all_gather_coalesced",
       {.coalesced = true},
       all_gather_slots,
       [](Call& k) {
         return started(
             all_gather_coalesced(by_rank(k), k.range(0, k.c.parts.size()), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto outputs = by_rank(k);
         auto inputs = k.range(0, k.c.parts.size());
         return started(
             k.place.backend->allgather_coalesced(outputs, inputs, options_of<c10d::AllgatherOptions>(k)));
       }},
      {"all_gather_into_tensor_coalesced",
       {.coalesced = true},
       all_gather_into_slots,
       [](Call& k) {
         const size_t parts = k.c.parts.size();
         return started(all_gather_into_tensor_coalesced(k.range(parts, parts), k.range(0, parts),
                                                         k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto inputs = k.range(0, k.c.parts.size());
         auto outputs = k.range(k.c.parts.size(), k.c.parts.size());
         return started(k.place.backend->allgather_into_tensor_coalesced(
             outputs, inputs, options_of<c10d::AllgatherOptions>(k)));
       }},
      {"gather",
       {.rooted = true},
       gather_slots,
       [](Call& k) {
         return started(gather(k.tensors[0], k.range(1, k.tensors.size() - 1), k.global(k.c.root),
                               k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto inputs = k.range(0, 1);
         std::vector<Tensors> outputs;
         if (k.rank() == k.c.root) outputs.push_back(k.range(1, k.tensors.size() - 1));
         return started(k.place.backend->gather(outputs, inputs, options_of<c10d::GatherOptions>(k)));
       }},
      {"scatter",
       {.rooted = true},
       scatter_slots,
       [](Call& k) {
         return started(scatter(k.tensors[0], k.range(1, k.tensors.size() - 1), k.global(k.c.root),
                                k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto outputs = k.range(0, 1);
         std::vector<Tensors> inputs;
         if (k.rank() == k.c.root) inputs.push_back(k.range(1, k.tensors.size() - 1));
         return started(k.place.backend->scatter(outputs, inputs, options_of<c10d::ScatterOptions>(k)));
       }},
      {"reduce_scatter",
       {.reduces = true},
       reduce_scatter_slots,
       [](Call& k) {
         return started(reduce_scatter(k.tensors[0], k.range(1, k.tensors.size() - 1), k.reduction(),
                                       k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto outputs = k.range(0, 1);
         std::vector<Tensors> inputs{k.range(1, k.tensors.size() - 1)};
         return started(
             k.place.backend->reduce_scatter(outputs, inputs, options_of<c10d::ReduceScatterOptions>(k)));
       }},
      {"reduce_scatter_tensor",
       {.reduces = true},
       reduce_scatter_tensor_slots,
       [](Call& k) {
         return started(reduce_scatter_tensor(k.tensors[1], k.tensors[0], k.reduction(), k.place.group,
                                              k.c.asynchronous));
       },
       [](Call& k) {
         return started(k.place.backend->_reduce_scatter_base(k.tensors[1], k.tensors[0],
                                                              options_of<c10d::ReduceScatterOptions>(k)));
       }},
      {"reduce_scatter_tensor_coalesced",
       {.reduces = true, .coalesced = true},
       reduce_scatter_tensor_slots,
       [](Call& k) {
         const size_t parts = k.c.parts.size();
         return started(reduce_scatter_tensor_coalesced(k.range(parts, parts), k.range(0, parts),
                                                        k.reduction(), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto inputs = k.range(0, k.c.parts.size());
         auto outputs = k.range(k.c.parts.size(), k.c.parts.size());
         return started(k.place.backend->reduce_scatter_tensor_coalesced(
             outputs, inputs, options_of<c10d::ReduceScatterOptions>(k)));
       }},
      {"all_to_all",
       {.splits = true},
       all_to_all_slots,
       [](Call& k) {
         const auto ranks = static_cast<size_t>(k.c.ranks);
         return started(
             all_to_all(k.range(ranks, ranks), k.range(0, ranks), k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         const auto ranks = static_cast<size_t>(k.c.ranks);
         auto inputs = k.range(0, ranks);
         auto outputs = k.range(ranks, ranks);
         return started(k.place.backend->alltoall(outputs, inputs, options_of<c10d::AllToAllOptions>(k)));
       }},
      {"all_to_all_single",
       {.splits = true},
       all_to_all_single_slots,
       [](Call& k) {
         const auto [sent, received] = splits_of(k);
         return started(
             all_to_all_single(k.tensors[1], k.tensors[0], received, sent, k.place.group, k.c.asynchronous));
       },
       [](Call& k) {
         auto [sent, received] = splits_of(k);
         return started(k.place.backend->alltoall_base(k.tensors[1], k.tensors[0], received, sent,
                                                       options_of<c10d::AllToAllOptions>(k)));
       }},
      {"send and recv", {.point_to_point = true}, send_slots, call_send, call_backend_send},
      {"batch_isend_irecv", {.point_to_point = true}, batch_slots, call_batch, call_backend_batch},
      {"barrier",
       {.tensors = false},
       no_slots,
       [](Call& k) { return started(barrier(k.place.group, k.c.asynchronous)); },
       [](Call& k) { return started(k.place.backend->barrier(options_of<c10d::BarrierOptions>(k))); }},
      {"monitored_barrier",
       {.point_to_point = true, .tensors = false},
       no_slots,
       [](Call& k) {
         monitored_barrier(k.place.group);
         return Started{};
       },
       [](Call& k) {
         k.place.backend->monitoredBarrier({}, /*waitAllRanks=*/true);
         return Started{};
       }},
  };
  return kOperations;
}

const Operation& operation_named(const std::string& name) {
  for (const Operation& operation : operations()) {
    if (name == operation.name) return operation;
  }
  throw std::invalid_argument("no operation is named " + name);
}

std::vector<at::Tensor> Call::range(size_t begin, size_t count) const {
  const auto first = tensors.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

ReduceOp Call::reduction() const {
  return c.reduction == ReduceOp::PREMUL_SUM ? premul_sum(premul_factor(c, rank())) : ReduceOp(c.reduction);
}

SharedMemory Place::shared_memory() const {
  if (backend) {
    return [backend = backend](int64_t numel, at::ScalarType type) {
      return backend->allocateTensor(numel, at::TensorOptions(type));
    };
  }
  return [group = group](int64_t numel, at::ScalarType type) { return empty_shared({numel}, type, group); };
}

}  // namespace lockstep::testing

#include <ATen/ops/cat.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <lockstep/collectives/testing/operation_slots.h>

namespace lockstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

Slot input(at::Tensor value) {
  return {.initial = std::move(value), .expected = {}};
}
Slot output(at::Tensor value) {
  return {.initial = {}, .expected = std::move(value)};
}
Slot in_place(at::Tensor before, at::Tensor after) {
  return {.initial = std::move(before), .expected = std::move(after)};
}
Slot contiguous(Slot slot) {
  slot.contiguous = true;
  return slot;
}

/// `tensors` one after the other, or along a new dimension.
at::Tensor join(const Case& c, const Tensors& tensors) {
  return c.stacked || tensors[0].dim() == 0 ? at::stack(tensors) : at::cat(tensors);
}

/// What rank `from` contributes to the reduction that rank `to` receives.
at::Tensor share(const Case& c, int from, int to, size_t part) {
  return contribution(c, from, static_cast<int64_t>(part) * c.ranks + to, c.parts[part]);
}

at::Tensor reduced_share(const Case& c, int to, size_t part) {
  Tensors shares;
  for (int from = 0; from < c.ranks; ++from) shares.push_back(share(c, from, to, part));
  return fold(c, shares);
}

/// What `from` sends to `to`: as many rows as the case says, of seven elements.
at::Tensor parcel(const Case& c, int from, int to) {
  return contribution(c, from, to, {c.rows[static_cast<size_t>(from)][static_cast<size_t>(to)], 7});
}

}  // namespace

// ---- Reductions to all ranks.

Slots all_reduce_slots(const Case& c, int rank) {
  Slots slots;
  for (size_t part = 0; part < c.parts.size(); ++part) {
    const Tensors inputs = contributions(c, static_cast<int64_t>(part), c.parts[part]);
    slots.push_back(in_place(inputs[static_cast<size_t>(rank)], fold(c, inputs)));
  }
  return slots;
}

/// Rows at random places, some of them more than once, on each rank as many as it likes.
Slots sparse_slots(const Case& c, int rank) {
  const Sizes sizes{11, 3};
  Tensors all, indices, values;
  for (int peer = 0; peer < c.ranks; ++peer) {
    Random random(c.seed + static_cast<uint64_t>(peer));
    std::vector<int64_t> rows(static_cast<size_t>(draw(random, 0, 6)));
    for (int64_t& row : rows) row = draw(random, 0, sizes[0] - 1);
    const auto count = static_cast<int64_t>(rows.size());
    indices.push_back(at::tensor(rows, at::kLong).view({1, count}));
    values.push_back(contribution(c, peer, 0, {count, sizes[1]}));
    all.push_back(at::sparse_coo_tensor(indices.back(), values.back(), sizes));
  }
  // In a wide type, for torch has no sparse sums of all.
  const auto wide = c10::isComplexType(c.dtype)    ? at::kComplexDouble
                    : c10::isFloatingType(c.dtype) ? at::kDouble
                                                   : at::kLong;
  const at::Tensor sum =
      at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values).to(wide), sizes).coalesce();
  const at::Tensor right = at::sparse_coo_tensor(sum.indices(), sum.values().to(c.dtype), sizes);
  return {in_place(all[static_cast<size_t>(rank)], right._coalesced_(true))};
}

// ---- From one, to one.

Slots reduce_slots(const Case& c, int rank) {
  const Tensors inputs = contributions(c, 0, c.parts[0]);
  const at::Tensor& mine = inputs[static_cast<size_t>(rank)];
  return {rank == c.root ? in_place(mine, fold(c, inputs)) : input(mine)};
}

Slots broadcast_slots(const Case& c, int rank) {
  const Tensors inputs = contributions(c, 0, c.parts[0]);
  return {in_place(inputs[static_cast<size_t>(rank)], inputs[static_cast<size_t>(c.root)])};
}

Slots gather_slots(const Case& c, int rank) {
  const Tensors inputs = contributions(c, 0, c.parts[0]);
  Slots slots{input(inputs[static_cast<size_t>(rank)])};
  if (rank == c.root) {
    for (const at::Tensor& each : inputs) slots.push_back(output(each));
  }
  return slots;
}

Slots scatter_slots(const Case& c, int rank) {
  Slots slots{output(contribution(c, c.root, rank, c.parts[0]))};
  if (rank == c.root) {
    for (int to = 0; to < c.ranks; ++to) slots.push_back(input(contribution(c, c.root, to, c.parts[0])));
  }
  return slots;
}

// ---- From all, to all.

Slots all_gather_slots(const Case& c, int rank) {
  Slots slots;
  for (size_t part = 0; part < c.parts.size(); ++part) {
    slots.push_back(input(contribution(c, rank, static_cast<int64_t>(part), c.parts[part])));
  }
  for (size_t part = 0; part < c.parts.size(); ++part) {
    for (const at::Tensor& each : contributions(c, static_cast<int64_t>(part), c.parts[part])) {
      slots.push_back(output(each));
    }
  }
  return slots;
}

/// Inputs first, then outputs.
Slots all_gather_into_slots(const Case& c, int rank) {
  Slots inputs, outputs;
  for (size_t part = 0; part < c.parts.size(); ++part) {
    const Tensors all = contributions(c, static_cast<int64_t>(part), c.parts[part]);
    inputs.push_back(input(all[static_cast<size_t>(rank)]));
    outputs.push_back(output(join(c, all)));
  }
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return inputs;
}

Slots reduce_scatter_slots(const Case& c, int rank) {
  Slots slots{output(reduced_share(c, rank, 0))};
  for (int to = 0; to < c.ranks; ++to) slots.push_back(input(share(c, rank, to, 0)));
  return slots;
}

Slots reduce_scatter_tensor_slots(const Case& c, int rank) {
  Slots inputs, outputs;
  for (size_t part = 0; part < c.parts.size(); ++part) {
    Tensors shares;
    for (int to = 0; to < c.ranks; ++to) shares.push_back(share(c, rank, to, part));
    inputs.push_back(input(join(c, shares)));
    outputs.push_back(output(reduced_share(c, rank, part)));
  }
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return inputs;
}

Slots all_to_all_slots(const Case& c, int rank) {
  Slots slots;
  for (int to = 0; to < c.ranks; ++to) slots.push_back(input(parcel(c, rank, to)));
  for (int from = 0; from < c.ranks; ++from) slots.push_back(output(parcel(c, from, rank)));
  return slots;
}

Slots all_to_all_single_slots(const Case& c, int rank) {
  Tensors sent, received;
  for (int peer = 0; peer < c.ranks; ++peer) {
    sent.push_back(parcel(c, rank, peer));
    received.push_back(parcel(c, peer, rank));
  }
  return {contiguous(input(at::cat(sent))), contiguous(output(at::cat(received)))};
}

Neighbours neighbours(const Case& c, int rank) {
  const int distance = (c.peer - c.root + c.ranks) % c.ranks;
  return {(rank + distance) % c.ranks, (rank - distance + c.ranks) % c.ranks};
}

// ---- Point to point.

Slots send_slots(const Case& c, int rank) {
  if (c.ranks == 1) return {};
  const at::Tensor message = contribution(c, c.root, 0, c.parts[0]);
  if (rank == c.root) return {contiguous(input(message))};
  if (rank == c.peer) return {contiguous(output(message))};
  return {};
}

Slots batch_slots(const Case& c, int rank) {
  if (c.ranks == 1) return {};
  return {contiguous(input(contribution(c, rank, 0, c.parts[0]))),
          contiguous(output(contribution(c, neighbours(c, rank).behind, 0, c.parts[0])))};
}

Slots no_slots(const Case&, int) {
  return {};
}

}  // namespace lockstep::testing

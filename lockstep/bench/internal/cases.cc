#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/bench/internal/cases.h>
#include <lockstep/bench/internal/pattern.h>
#include <lockstep/collectives/functional.h>

namespace lockstep::bench::internal {
namespace {

/// What the makers of cases share.
struct Setting {
  int64_t count;
  int rank;
  int ranks;
  int root;
  ReduceOp op;
  Contributions data;
  at::Tensor first;   // as many elements as this case needs
  at::Tensor second;  // undefined where it needs one buffer only

  bool in_place() const { return !second.defined(); }
  /// Rank r's part of a buffer that has one for each.
  at::Tensor part(const at::Tensor& buffer, int r) const { return buffer.narrow(0, r * count, count); }
  std::vector<at::Tensor> parts(const at::Tensor& buffer) const {
    std::vector<at::Tensor> result;
    for (int r = 0; r < ranks; ++r) result.push_back(part(buffer, r));
    return result;
  }
};

void fill(const at::Tensor& tensor, const Pattern& pattern) {
  pattern.fill(tensor.mutable_data_ptr(), tensor.numel());
}

/// Against the pattern from index `from` on.
int64_t wrong_in(const at::Tensor& tensor, const Pattern& pattern, int64_t from = 0) {
  return pattern.count_wrong(tensor.const_data_ptr(), tensor.numel(), from);
}

/// Before every iteration `tensor` gets what this rank contributes.
std::function<void(int64_t)> contribute(const Setting& s, const at::Tensor& tensor) {
  return [s, tensor](int64_t iteration) { fill(tensor, s.data.of(s.rank, iteration)); };
}

Case all_reduce_case(const Setting& s) {
  return {contribute(s, s.first), [s] { all_reduce(s.first, s.op); },
          [s](int64_t iteration) { return wrong_in(s.first, s.data.reduced(iteration)); }};
}

Case reduce_case(const Setting& s) {
  return {contribute(s, s.first), [s] { reduce(s.first, s.root, s.op); },
          [s](int64_t iteration) {  // the other ranks' tensors stay as they are
            return wrong_in(s.first,
                            s.rank == s.root ? s.data.reduced(iteration) : s.data.of(s.rank, iteration));
          }};
}

Case broadcast_case(const Setting& s) {
  return {contribute(s, s.first), [s] { broadcast(s.first, s.root); },
          [s](int64_t iteration) { return wrong_in(s.first, s.data.of(s.root, iteration)); }};
}

/// A buffer whose parts are all ranks' contributions.
int64_t wrong_in_gathered(const Setting& s, const at::Tensor& all, int64_t iteration) {
  int64_t wrong = 0;
  for (int r = 0; r < s.ranks; ++r) wrong += wrong_in(s.part(all, r), s.data.of(r, iteration));
  return wrong;
}

Case all_gather_case(const Setting& s) {
  const at::Tensor output = s.in_place() ? s.first : s.second;
  const at::Tensor input = s.in_place() ? s.part(s.first, s.rank) : s.first;
  return {contribute(s, input), [=] { all_gather_into_tensor(output, input); },
          [=](int64_t iteration) { return wrong_in_gathered(s, output, iteration); }};
}

Case gather_case(const Setting& s) {
  const bool at_root = s.rank == s.root;
  const at::Tensor all = s.in_place() ? s.first : s.second;
  const at::Tensor input = !s.in_place() ? s.first : s.part(s.first, at_root ? s.rank : 0);
  const std::vector<at::Tensor> outputs = at_root ? s.parts(all) : std::vector<at::Tensor>();
  return {contribute(s, input), [=] { gather(input, outputs, s.root); },
          [=](int64_t iteration) { return at_root ? wrong_in_gathered(s, all, iteration) : 0; }};
}

Case reduce_scatter_case(const Setting& s) {
  const at::Tensor output = s.in_place() ? s.part(s.first, s.rank) : s.second;
  return {contribute(s, s.first), [=] { reduce_scatter_tensor(output, s.first, s.op); },
          [=](int64_t iteration) { return wrong_in(output, s.data.reduced(iteration), s.rank * s.count); }};
}

Case scatter_case(const Setting& s) {
  const bool at_root = s.rank == s.root;
  const at::Tensor output = !s.in_place() ? s.second : s.part(s.first, at_root ? s.rank : 0);
  const std::vector<at::Tensor> inputs = at_root ? s.parts(s.first) : std::vector<at::Tensor>();
  return {
      contribute(s, s.first), [=] { scatter(output, inputs, s.root); },
      [=](int64_t iteration) { return wrong_in(output, s.data.of(s.root, iteration), s.rank * s.count); }};
}

Case all_to_all_case(const Setting& s) {
  return {contribute(s, s.first), [s] { all_to_all_single(s.second, s.first); },
          [s](int64_t iteration) {
            int64_t wrong = 0;
            for (int r = 0; r < s.ranks; ++r) {
              wrong += wrong_in(s.part(s.second, r), s.data.of(r, iteration), s.rank * s.count);
            }
            return wrong;
          }};
}

/// Around the ring: every rank sends to the next and receives from the one before, all at once.
Case sendrecv_case(const Setting& s) {
  const int next = (s.rank + 1) % s.ranks;
  const int previous = (s.rank + s.ranks - 1) % s.ranks;
  const std::vector<P2POp> operations = {{P2POp::Kind::kSend, s.first, next},
                                         {P2POp::Kind::kReceive, s.second, previous}};
  return {contribute(s, s.first),
          [operations] {
            for (const Work& work : batch_isend_irecv(operations)) work->wait();
          },
          [s, previous](int64_t iteration) { return wrong_in(s.second, s.data.of(previous, iteration)); }};
}

/// Rank 0 to rank 1 and back; the others look on.
Case pingpong_case(const Setting& s) {
  if (s.rank > 1) return {[](int64_t) {}, [] {}, [](int64_t) { return int64_t{0}; }, 0};
  const int peer = 1 - s.rank;
  return {contribute(s, s.first),
          [s, peer] {
            if (s.rank == 0) send(s.first, peer);
            recv(s.second, peer);
            if (s.rank == 1) send(s.first, peer);
          },
          [s, peer](int64_t iteration) { return wrong_in(s.second, s.data.of(peer, iteration)); },
          s.rank == 0 ? 0.5 : 0};
}

Case barrier_case() {
  return {[](int64_t) {}, [] { barrier(); }, [](int64_t) { return int64_t{0}; }};
}

}  // namespace

Buffers allocate_buffers(const Plan& plan) {
  const auto allocate = [&](int64_t elements) {
    if (elements == 0) return at::Tensor();
    return plan.memory == MemoryKind::kArena ? empty_shared({elements}, plan.dtype)
                                             : at::empty({elements}, plan.dtype);
  };
  return {allocate(plan.buffers.first), allocate(plan.buffers.second)};
}

Case make_case(const Plan& plan, const CollectiveInfo& info, Placement placement, int64_t count, int rank,
               const Buffers& buffers) {
  const BufferElements needed = buffer_elements(info, placement, count, plan.ranks);
  const auto op = info.reduces ? std::optional(plan.op) : std::nullopt;
  const Setting s{count,
                  rank,
                  plan.ranks,
                  plan.root,
                  plan.op,
                  Contributions(plan.dtype, op, plan.ranks, std::max(needed.first, needed.second)),
                  needed.first > 0 ? buffers.first.narrow(0, 0, needed.first) : at::Tensor(),
                  needed.second > 0 ? buffers.second.narrow(0, 0, needed.second) : at::Tensor()};
  switch (info.collective) {
    case Collective::kAllReduce:
      return all_reduce_case(s);
    case Collective::kReduce:
      return reduce_case(s);
    case Collective::kBroadcast:
      return broadcast_case(s);
    case Collective::kAllGather:
      return all_gather_case(s);
    case Collective::kReduceScatter:
      return reduce_scatter_case(s);
    case Collective::kAllToAll:
      return all_to_all_case(s);
    case Collective::kGather:
      return gather_case(s);
    case Collective::kScatter:
      return scatter_case(s);
    case Collective::kSendRecv:
      return sendrecv_case(s);
    case Collective::kPingPong:
      return pingpong_case(s);
    case Collective::kBarrier:
      return barrier_case();
  }
  TORCH_INTERNAL_ASSERT(false, "no case for ", info.name);
}

}  // namespace lockstep::bench::internal

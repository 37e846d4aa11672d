#include <exception>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/fsdp/internal/weight_memory.h>

namespace lockstep::fsdp::internal {
namespace {

constexpr size_t kPage = 4096;

ProcessGroup same_ranks(const ProcessGroup& parent) {
  std::vector<int> ranks(static_cast<size_t>(parent->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return split_group(parent, {ranks}, {}, "fsdp");
}

int64_t broadcast_number(const ProcessGroup& group, int64_t number) {
  std::vector<at::Tensor> tensors{at::empty({1}, at::kLong).fill_(number)};
  group->broadcast(tensors)->wait();
  return tensors[0].item<int64_t>();
}

}  // namespace

WeightMemory::WeightMemory(const ProcessGroup& parent, size_t bytes,
                           std::vector<transport::ReadOnlyView::Part> parts)
    : group_(same_ranks(parent)) {
  try {
    open(bytes, std::move(parts));
  } catch (...) {
    leave();
    throw;
  }
}

void WeightMemory::open(size_t bytes, std::vector<transport::ReadOnlyView::Part> parts) {
  const auto backend = lockstep_backend_of(*group_);
  TORCH_CHECK_VALUE(
      backend && !backend->spans_hosts(),
      "FullyShardedDataParallel: the ranks of the process group must be on one host, where they share the "
      "weights' memory");
  auto& channel = backend->channel();
  bytes = (bytes + kPage - 1) / kPage * kPage;
  if (bytes == 0) bytes = kPage;
  std::exception_ptr error;
  int64_t reference = 0;
  if (group_->getRank() == 0) {
    const auto arena = channel.transport().shared_arena();
    try {
      writable_ = arena->allocate(bytes);
      reference = static_cast<int64_t>(transport::pack_reference(arena->find(writable_, bytes).value()));
      channel.release_after_close([arena, memory = writable_] { arena->deallocate(memory); });
    } catch (...) {
      error = std::current_exception();
    }
  }
  reference = broadcast_number(group_, reference);
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_WITH(DistBackendError, reference != 0, "FullyShardedDataParallel: rank ",
                   get_global_rank(group_, 0), " has no memory for the weights");
  if (group_->getRank() != 0) {
    const int first = channel.members()[0];
    writable_ =
        channel.transport().address(first, transport::unpack_reference(static_cast<uint64_t>(reference)),
                                    Deadline::after(backend->timeout()), bytes);
  }
  view_ = std::make_unique<transport::ReadOnlyView>(writable_, bytes, std::move(parts));
}

WeightMemory::~WeightMemory() {
  leave();
}

void WeightMemory::leave() noexcept {
  try {
    destroy_process_group(group_);
  } catch (const std::exception& error) {
    // The groups are gone already, by destroy_process_group() of all of them.
    LOCKSTEP_LOG(kDebug) << "the group of a sharded model: " << text_of(error);
  }
}

}  // namespace lockstep::fsdp::internal

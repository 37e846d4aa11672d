#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/state_sync.h>
#include <lockstep/parallel/fsdp/internal/weight_memory.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

namespace lockstep::fsdp::internal {
namespace {

int64_t broadcast_number(const ProcessGroup& group, int64_t number) {
  std::vector<at::Tensor> tensors{at::empty({1}, at::kLong).fill_(number)};
  const CallSite site("FSDP's memory");
  group->broadcast(tensors)->wait();
  return tensors[0].item<int64_t>();
}

}  // namespace

WeightMemory::WeightMemory(std::shared_ptr<const ShardGroups> groups, size_t bytes,
                           std::vector<transport::ReadOnlyView::Part> parts,
                           const std::optional<std::filesystem::path>& offload)
    : groups_(std::move(groups)) {
  const size_t page = page_bytes();
  bytes = std::max<size_t>((bytes + page - 1) / page, 1) * page;
  if (offload) {
    map_file(*offload, bytes);
  } else {
    allocate(bytes);
  }
  view_ = std::make_unique<transport::ReadOnlyView>(writable_, bytes, std::move(parts));
}

void WeightMemory::allocate(size_t bytes) {
  const ProcessGroup& host = groups_->host();
  const auto backend = lockstep_backend_of(*host);
  TORCH_CHECK_VALUE(backend,
                    "FullyShardedDataParallel: the process group has no backend \"lockstep\" for the CPU, "
                    "by which ranks share memory");
  auto& channel = backend->channel();
  std::exception_ptr error;
  int64_t reference = 0;
  if (host->getRank() == 0) {
    const auto arena = channel.transport().shared_arena();
    try {
      writable_ = arena->allocate(bytes);
      reference = static_cast<int64_t>(transport::pack_reference(arena->find(writable_, bytes).value()));
      channel.release_after_close([arena, memory = writable_] { arena->deallocate(memory); });
    } catch (...) {
      error = std::current_exception();
    }
  }
  reference = broadcast_number(host, reference);
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_WITH(DistBackendError, reference != 0, "FullyShardedDataParallel: rank ",
                   get_global_rank(host, 0), " has no memory for the weights");
  if (host->getRank() != 0) {
    const int first = channel.members()[0];
    writable_ =
        channel.transport().address(first, transport::unpack_reference(static_cast<uint64_t>(reference)),
                                    Deadline::after(backend->timeout()), bytes);
  }
}

void WeightMemory::map_file(const std::filesystem::path& directory, size_t bytes) {
  const ProcessGroup& host = groups_->host();
  const bool makes = host->getRank() == 0;
  run_on_all(host, "to make the file of the weights", [&] {
    if (makes) file_ = OffloadFile::create(directory, bytes);
  });
  const std::string path = broadcast_bytes(makes ? file_->path().string() : "", host);
  failpoint::here("fsdp.offload.named");
  run_on_all(host, "to open the file of the weights", [&] {
    if (!makes) file_ = OffloadFile::open(path, bytes);
  });
  file_->unlink();
  writable_ = file_->data();
}

}  // namespace lockstep::fsdp::internal

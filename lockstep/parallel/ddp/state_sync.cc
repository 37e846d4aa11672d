#include <algorithm>
#include <map>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/state_sync.h>

namespace lockstep {
namespace {

/// Tensors of one dtype travel together up to this size; larger ones alone.
constexpr int64_t kBroadcastBytes = 16 << 20;

std::string describe(const NamedTensor& parameter) {
  std::ostringstream text;
  text << '\'' << parameter.first << "' (" << parameter.second.scalar_type() << ' '
       << parameter.second.sizes();
  if (!parameter.second.is_contiguous()) text << " with strides " << parameter.second.strides();
  text << ')';
  return text.str();
}

void broadcast(const at::Tensor& tensor, const ProcessGroup& group, int source = 0) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const CallSite site({});  // for what the caller says
  group->broadcast(tensors, options)->wait();
}

void broadcast_pack(const std::vector<at::Tensor>& tensors, const ProcessGroup& group, int source) {
  if (tensors.size() == 1 && tensors[0].is_non_overlapping_and_dense()) {
    return broadcast(tensors[0], group, source);
  }
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  at::Tensor flat = at::empty({numel}, tensors[0].options().requires_grad(false));
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    if (group->getRank() == source) flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()).copy_(tensor);
    offset += tensor.numel();
  }
  broadcast(flat, group, source);
  offset = 0;
  for (at::Tensor tensor : tensors) {
    if (group->getRank() != source) tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

}  // namespace

void verify_same_model(const std::vector<NamedTensor>& parameters, const ProcessGroup& group) {
  if (group->getSize() == 1) return;
  const CallSite site("a comparison of the ranks' models");
  std::vector<std::string> own;
  std::string text;
  for (const NamedTensor& parameter : parameters) {
    own.push_back(describe(parameter));
    text += own.back() + '\n';
  }
  std::vector<std::string> first;
  std::istringstream lines(broadcast_bytes(std::move(text), group));
  for (std::string line; std::getline(lines, line);) first.push_back(line);
  // Per rank: the index of the first difference, or −1; and the number of parameters.
  const auto difference = std::mismatch(own.begin(), own.end(), first.begin(), first.end());
  const bool same = difference.first == own.end() && difference.second == first.end();
  at::Tensor mine = at::empty({2}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = same ? -1 : difference.first - own.begin();
  mine.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(own.size());
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < group->getSize(); ++rank) all[0].push_back(at::empty_like(mine));
  std::vector<at::Tensor> input{mine};
  group->allgather(all, input)->wait();
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto* report = all[0][rank].const_data_ptr<int64_t>();
    if (report[0] < 0) continue;
    TORCH_CHECK(static_cast<size_t>(report[1]) == first.size(),
                "DDP expects same model across all ranks, but Rank ", rank, " has ", report[1],
                " params, while rank 0 has ", first.size(), ".");
    const auto index = static_cast<size_t>(report[0]);
    TORCH_CHECK(false, "DDP expects same model across all ranks: params[", index, "] of rank ", rank,
                rank == group->getRank() ? ", " + own[index] + "," : "", " appears not to match rank 0's ",
                first[index]);
  }
}

void broadcast_coalesced(const std::vector<NamedTensor>& tensors, const ProcessGroup& group, int source) {
  if (group->getSize() == 1) return;
  const CallSite site("parameters and buffers");
  at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const auto& [name, tensor] : tensors) {
    // Unlike detach(), with a version counter of its own.
    auto alias = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false);
    by_type[tensor.scalar_type()].emplace_back(std::move(alias));
  }
  for (const auto& [type, members] : by_type) {
    std::vector<at::Tensor> pack;
    int64_t bytes = 0;
    for (const at::Tensor& tensor : members) {
      const auto size = static_cast<int64_t>(tensor.nbytes());
      if (!pack.empty() && bytes + size > kBroadcastBytes) {
        broadcast_pack(pack, group, source);
        pack.clear();
        bytes = 0;
      }
      pack.push_back(tensor);
      bytes += size;
    }
    if (!pack.empty()) broadcast_pack(pack, group, source);
  }
}

std::string broadcast_bytes(std::string bytes, const ProcessGroup& group, int source) {
  at::Tensor length = at::empty({1}, at::kLong).fill_(static_cast<int64_t>(bytes.size()));
  broadcast(length, group, source);
  bytes.resize(length.item<int64_t>());
  broadcast(at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte), group, source);
  return bytes;
}

int find_common_rank(const ProcessGroup& group, bool candidate) {
  at::Tensor rank = at::empty({1}, at::kLong).fill_(candidate ? group->getRank() : -1);
  std::vector<at::Tensor> tensors{rank};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.asyncOp = false;
  const CallSite site("the choice of a rank whose state all take");
  group->allreduce(tensors, options)->wait();
  return static_cast<int>(rank.item<int64_t>());
}

}  // namespace lockstep

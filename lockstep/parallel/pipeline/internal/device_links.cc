#include <exception>
#include <utility>

#include <ATen/ops/as_strided.h>
#include <ATen/ops/zeros.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/parallel/pipeline/internal/device_links.h>

namespace lockstep::pipeline::internal {
namespace {

/// The bytes of a tensor without gaps, in their order in memory.
at::Tensor bytes_in_memory(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

}  // namespace

DeviceLinks::DeviceLinks(const ProcessGroup& group, c10::Device device)
    : device_(device), rank_(group->getRank()) {
  const std::vector<int> ranks = all_ranks(group->getSize());
  up_ = split_group(group, {ranks}, {}, "pipeline_up");
  down_ = split_group(group, {ranks}, {}, "pipeline_down");
}

DeviceLinks::~DeviceLinks() {
  for (ProcessGroup* group : {&up_, &down_}) {
    try {
      destroy_process_group(*group);
    } catch (const std::exception& error) {
      // The groups are gone already, by destroy_process_group() of all of them.
      LOCKSTEP_LOG(kDebug) << "a group of a pipeline: " << text_of(error);
    }
  }
}

void DeviceLinks::connect(const std::set<std::pair<int, int>>& pairs) const {
  const at::Tensor number = at::zeros({1}, at::TensorOptions(at::kByte).device(device_));
  for (const auto& [from, to] : pairs) {
    if (from == rank_) send(number, to)->wait();
    if (to == rank_) receive(number, from)->wait();
  }
}

bool DeviceLinks::takes(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.numel() > 0 && tensor.device().type() == device_.type();
}

Work DeviceLinks::send(const at::Tensor& tensor, int to) const {
  std::vector<at::Tensor> sent{bytes_in_memory(tensor)};
  return group_to(rank_, to)->send(sent, to, /*tag=*/0);
}

Work DeviceLinks::receive(const at::Tensor& tensor, int from) const {
  std::vector<at::Tensor> received{bytes_in_memory(tensor)};
  return group_to(from, rank_)->recv(received, from, /*tag=*/0);
}

void DeviceLinks::abort() const noexcept {
  for (const ProcessGroup& group : {up_, down_}) {
    try {
      lockstep::abort(group);
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kDebug) << "a group of a pipeline can't be aborted: " << text_of(error);
    }
  }
}

}  // namespace lockstep::pipeline::internal

#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <lockstep/device/existing_device.h>
#include <lockstep/device/streams.h>
#include <lockstep/parallel/data_parallel/internal/parallel_apply.h>

namespace lockstep::data_parallel::internal {
namespace {

/// Zero as long as torch's CUDA library is not loaded. Torch's own hooks are not asked: they keep their first
/// answer for ever.
int64_t usable_cuda_devices() {
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount();
}

}  // namespace

ParallelPlan ParallelPlan::of(std::vector<at::Device> device_ids, std::optional<at::Device> output_device,
                              int64_t dim, int64_t num_replicas) {
  TORCH_CHECK_VALUE(num_replicas >= 0, "DataParallel: num_replicas is ", num_replicas,
                    "; it is the number of replicas on the CPU, or 0 where device_ids tell");
  TORCH_CHECK_VALUE(
      num_replicas == 0 || device_ids.empty(),
      "DataParallel: num_replicas makes replicas on the CPU, and device_ids on the devices that it "
      "names; give one of them");
  if (num_replicas > 0) device_ids.assign(static_cast<size_t>(num_replicas), at::Device(at::kCPU));
  if (device_ids.empty()) {
    for (int64_t i = 0; i < usable_cuda_devices(); ++i) {
      device_ids.emplace_back(at::kCUDA, static_cast<at::DeviceIndex>(i));
    }
  }
  if (device_ids.empty()) device_ids.emplace_back(at::kCPU);
  for (auto& device : device_ids) {
    TORCH_CHECK_VALUE(device.type() == device_ids[0].type(), "DataParallel: device_ids holds ",
                      device_ids[0].str(), " and ", device.str(), "; all must be of one type");
    device = existing_device(device, "DataParallel");
  }
  const auto output = existing_device(output_device.value_or(device_ids[0]), "DataParallel");
  return {.devices = std::move(device_ids), .output = {.device = output, .dim = dim}};
}

ParallelApply::ParallelApply(const std::shared_ptr<torch::nn::Module>& module, ParallelPlan plan,
                             ReplicaState::Clone clone)
    : plan_(std::move(plan)) {
  const auto& devices = plan_.devices;
  if (devices.size() == 1) {
    module->to(devices[0]);
    return;
  }
  state_.emplace(module, devices, std::move(clone));
  places_ = {.threads = std::make_shared<ThreadTeam>(static_cast<int>(devices.size()), "lockstep-replic"),
             .devices = devices};
}

void ParallelApply::replicate() {
  if (state_) state_->replicate();
}

ParallelBatch ParallelApply::scatter(const std::vector<at::Tensor>& tensors, bool any_arguments) {
  auto scattered = internal::scatter(tensors, plan_.devices, plan_.output.dim);
  ParallelBatch batch;
  batch.replicas = any_arguments ? scattered.replicas : 1;
  batch.chunks.resize(static_cast<size_t>(batch.replicas));
  for (size_t i = 0; i < batch.chunks.size(); ++i) {
    for (const auto& of_tensor : scattered.chunks) batch.chunks[i].push_back(of_tensor[i]);
  }
  if (state_) state_->bring_in_step(batch.replicas == 1 ? 0 : batch.replicas);
  if (batch.replicas == 1 || !c10::GradMode::is_enabled()) return batch;

  batch.graphs.resize(batch.chunks.size());
  for (size_t i = 0; i < batch.chunks.size(); ++i) {
    for (const auto& chunk : batch.chunks[i]) {
      if (!chunk.requires_grad()) continue;
      batch.graphs[i].sources.push_back(batch.inputs.size());
      batch.inputs.push_back(chunk);
      batch.graphs[i].leaves.push_back(chunk.detach().requires_grad_());
    }
  }
  for (size_t i = 0; i < batch.chunks.size(); ++i) {
    state_->append_leaves(static_cast<int>(i), batch.inputs.size(), batch.graphs[i]);
  }
  const auto parameters = state_->sources();
  batch.inputs.insert(batch.inputs.end(), parameters.begin(), parameters.end());
  return batch;
}

void ParallelApply::run(ParallelBatch& batch,
                        const std::function<void(int, const std::vector<at::Tensor>&)>& forward) {
  if (batch.replicas == 1) {
    const c10::OptionalDeviceGuard guard(plan_.devices[0]);
    forward(0, batch.chunks[0]);
    return;
  }
  std::vector<c10::Stream> streams;  // the caller's current ones, which the threads take over
  for (const auto& device : plan_.devices) {
    if (const auto stream = current_stream(device)) streams.push_back(*stream);
  }
  places_.threads->run(
      batch.replicas,
      [&](int replica) {
        const auto i = static_cast<size_t>(replica);
        c10::OptionalStreamGuard guard;
        if (!streams.empty()) guard.reset_stream(streams[i]);
        auto tensors = batch.chunks[i];
        if (!batch.graphs.empty()) {
          auto leaf = batch.graphs[i].leaves.begin();
          for (auto& tensor : tensors) {
            // Not the leaf itself, which the forward could not change in place.
            tensor = tensor.requires_grad() ? (leaf++)->clone() : tensor.detach();
          }
        }
        forward(replica, tensors);
      },
      [this](int replica) { return places_.name(replica); });
}

std::vector<std::vector<at::Tensor>> ParallelApply::join(ParallelBatch& batch,
                                                         std::vector<std::vector<at::Tensor>> outputs) {
  if (batch.graphs.empty()) return outputs;
  for (size_t i = 0; i < outputs.size(); ++i) batch.graphs[i].outputs = std::move(outputs[i]);
  return join_graphs(std::move(batch.graphs), batch.inputs, places_);
}

}  // namespace lockstep::data_parallel::internal

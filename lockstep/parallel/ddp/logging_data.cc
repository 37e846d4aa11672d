// DistributedDataParallel's logging data, under the names of torch/csrc/distributed/c10d/logger.cpp.
#include <set>

#include <ATen/Parallel.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <lockstep/parallel/ddp/ddp_core.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>

namespace lockstep {

c10::DDPLoggingData DdpCore::logging_data() const {
  c10::DDPLoggingData data;
  auto& text = data.strs_map;
  auto& number = data.ints_map;
  const ProcessGroup& group = options_.process_group;
  std::set<std::string> dtypes;
  size_t bytes = 0;
  int64_t tensors = 0;
  for (const auto& [name, parameter] : model_.parameters) {
    if (!parameter.requires_grad()) continue;
    dtypes.insert(c10::toString(parameter.scalar_type()));
    bytes += parameter.nbytes();
    ++tensors;
  }
  text["module_name"] = model_.name;
  text["dtypes"] = c10::Join(", ", dtypes);
  text["backend_name"] = get_backend(group);
  text["device_ids"] = input_device_ ? std::to_string(input_device_->index()) : "";
  number["world_size"] = group->getSize();
  number["rank"] = group->getRank();
  number["output_device"] = input_device_ ? input_device_->index() : -1;
  number["is_multi_device_module"] = is_multi_device_module_ ? 1 : 0;
  number["broadcast_buffers"] = forward_sync_buffers_;
  number["has_sync_bn"] = model_.has_sync_batch_norm;
  number["total_parameter_size_bytes"] = static_cast<int64_t>(bytes);
  number["num_parameter_tensors"] = tensors;
  number["find_unused_parameters"] = options_.find_unused_parameters;
  number["gradient_as_bucket_view"] = options_.gradient_as_bucket_view;
  if (!reducer_) return data;
  const auto report = reducer_->report();
  text["initial_bucket_sizes"] = c10::Join(", ", report.initial_bucket_bytes);
  text["bucket_sizes"] = c10::Join(", ", report.bucket_bytes);
  text["comm_hook"] = report.hook;
  text["prev_iteration_grad_ready_order_indices"] = c10::Join(", ", report.arrival_order);
  number["has_rebuilt_buckets"] = report.rebuilt;
  if (report.rebuilt) {
    text["rebuilt_bucket_sizes"] = c10::Join(", ", report.bucket_bytes);
    text["rebuilt_per_bucket_param_counts"] = c10::Join(", ", report.bucket_parameters);
  }
  number["num_buckets_reduced"] = static_cast<int64_t>(report.bucket_bytes.size());
  number["static_graph"] = report.static_graph;
  number["can_set_static_graph"] = report.can_set_static_graph;
  number["unused_parameter_size"] = static_cast<int64_t>(report.unused_bytes);
  const auto cap = [](size_t value) { return value > INT64_MAX ? INT64_MAX : static_cast<int64_t>(value); };
  number["bucket_cap_bytes"] = cap(report.caps.others);
  number["first_bucket_cap_bytes"] = cap(report.caps.first);
  number["tuned"] = report.tuned;
  number["iteration"] = report.rounds;
  number["has_error"] = !report.error.empty();
  if (!report.error.empty()) text["error"] = report.error;
  const auto add_times = [&](const std::string& prefix, const StepTimes& times) {
    number[prefix + "forward_compute_time"] = times.forward_compute;
    number[prefix + "backward_compute_time"] = times.backward_compute;
    number[prefix + "backward_comm_time"] = times.backward_comm;
    number[prefix + "backward_compute_comm_overlap_time"] = times.overlap;
    number[prefix + "backward_comm_exposed_time"] = times.exposed;
    number[prefix + "reduction_time"] = times.reducing;
  };
  add_times("", report.last);
  add_times("avg_", report.average);
  number["gradient_bytes"] = static_cast<int64_t>(report.last.bytes);
  number["gradient_bytes_in_place"] = static_cast<int64_t>(report.last.bytes_in_place);
  return data;
}

}  // namespace lockstep

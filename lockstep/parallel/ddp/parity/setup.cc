#include <algorithm>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/post_local_sgd_hook.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>
#include <lockstep/parallel/ddp/hooks/quantization_hooks.h>
#include <lockstep/parallel/ddp/parity/setup.h>

namespace parity {
namespace {

using lockstep::GradBucket;
using lockstep::HookFuture;

lockstep::MixedPrecision mixed_precision(const Dictionary& dtypes) {
  const auto dtype = [&](const char* key) -> std::optional<at::ScalarType> {
    if (!dtypes.has(key)) return std::nullopt;
    return dtype_of(dtypes.text(key));
  };
  return {.param_dtype = dtype("param_dtype"),
          .reduce_dtype = dtype("reduce_dtype"),
          .buffer_dtype = dtype("buffer_dtype")};
}

lockstep::PowerSGDState powersgd_state(const Dictionary& options) {
  lockstep::PowerSGDOptions answer;
  const auto integer = [&](const char* key, int64_t& value) {
    if (options.has(key)) value = options.integer(key);
  };
  const auto number = [&](const char* key, double& value) {
    if (options.has(key)) value = options.number(key);
  };
  const auto flag = [&](const char* key, bool& value) {
    if (options.has(key)) value = options.flag(key);
  };
  integer("matrix_approximation_rank", answer.matrix_approximation_rank);
  integer("start_powerSGD_iter", answer.start_powerSGD_iter);
  number("min_compression_rate", answer.min_compression_rate);
  flag("use_error_feedback", answer.use_error_feedback);
  flag("warm_start", answer.warm_start);
  number("orthogonalization_epsilon", answer.orthogonalization_epsilon);
  integer("random_seed", answer.random_seed);
  flag("batch_tensors_with_same_shape", answer.batch_tensors_with_same_shape);
  return lockstep::PowerSGDState({}, answer);
}

/// A user's own: twice the average, without an average.
HookFuture doubling_hook(const std::nullptr_t&, GradBucket& bucket) {
  auto work = lockstep::all_reduce(bucket.buffer(), lockstep::ReduceOp::SUM, {}, /*async_op=*/true);
  return lockstep::then(work->getFuture(),
                        [](const at::Tensor& sum) { return sum.mul(2.0 / lockstep::get_world_size()); });
}

std::vector<HookFuture> average_buffers(const std::vector<lockstep::NamedTensor>& buffers) {
  torch::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers) {
    auto total = buffer.to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true);
    lockstep::all_reduce(total);
    buffer.copy_(total / lockstep::get_world_size());
  }
  return {};
}

void register_comm_hook(Model& model, const Dictionary& job, const lockstep::ProcessGroup& pairs) {
  const std::string hook = job.text("hook");
  const auto options = job.dictionary("hook_options");
  if (hook == "allreduce") return model.register_comm_hook(nullptr, lockstep::allreduce_hook);
  if (hook == "fp16") return model.register_comm_hook(nullptr, lockstep::fp16_compress_hook);
  if (hook == "bf16") return model.register_comm_hook(nullptr, lockstep::bf16_compress_hook);
  if (hook == "fp16 wrapper") {
    return model.register_comm_hook(nullptr, lockstep::fp16_compress_wrapper(lockstep::allreduce_hook));
  }
  if (hook == "bf16 wrapper") {
    return model.register_comm_hook(nullptr, lockstep::bf16_compress_wrapper(lockstep::allreduce_hook));
  }
  if (hook == "int8 per tensor") {
    return model.register_comm_hook(nullptr, lockstep::quantization_pertensor_hook);
  }
  if (hook == "int8 per channel") {
    return model.register_comm_hook(nullptr, lockstep::quantization_perchannel_hook);
  }
  if (hook == "powersgd") return model.register_comm_hook(powersgd_state(options), lockstep::powerSGD_hook);
  if (hook == "batched powersgd") {
    return model.register_comm_hook(powersgd_state(options), lockstep::batched_powerSGD_hook);
  }
  if (hook == "fp16 wrapper powersgd") {
    return model.register_comm_hook(powersgd_state(options),
                                    lockstep::fp16_compress_wrapper(lockstep::powerSGD_hook));
  }
  if (hook == "post_local_sgd") {
    const lockstep::PostLocalSGDState state({}, pairs, options.integer("start_localSGD_iter"),
                                            options.flag("post_local_gradient_allreduce"));
    return model.register_comm_hook(state, lockstep::post_localSGD_hook);
  }
  if (hook == "noop") return model.register_comm_hook(nullptr, lockstep::noop_hook);
  if (hook == "doubling") return model.register_comm_hook(nullptr, doubling_hook);
  TORCH_CHECK(hook.empty(), "no hook '", hook, "'");
}

}  // namespace

at::ScalarType dtype_of(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "float64") return at::kDouble;
  if (name == "float16") return at::kHalf;
  if (name == "bfloat16") return at::kBFloat16;
  TORCH_CHECK(false, "no dtype '", name, "'");
}

lockstep::DistributedDataParallelOptions ddp_options(const Dictionary& job, const Net& net,
                                                     const lockstep::ProcessGroup& pairs) {
  const auto given = job.dictionary("options");
  const auto flag = [&](const char* key, bool fallback) {
    return given.has(key) ? given.flag(key) : fallback;
  };
  const auto optional_flag = [&](const char* key) {
    return given.has(key) ? std::optional<bool>(given.flag(key)) : std::nullopt;
  };
  lockstep::DistributedDataParallelOptions options{
      .forward_sync_buffers = optional_flag("forward_sync_buffers"),
      .broadcast_buffers = optional_flag("broadcast_buffers"),
      .init_sync = flag("init_sync", true),
      .find_unused_parameters = flag("find_unused_parameters", false),
      .gradient_as_bucket_view = flag("gradient_as_bucket_view", false),
      .static_graph = flag("static_graph", false),
      .skip_all_reduce_unused_params = flag("skip_all_reduce_unused_params", false)};
  if (given.has("process_group")) options.process_group = pairs;
  if (given.has("bucket_cap_mb")) options.bucket_cap_mb = given.number("bucket_cap_mb");
  if (given.has("bucket_cap_mb_list")) options.bucket_cap_mb_list = given.numbers("bucket_cap_mb_list");
  if (given.has("mixed_precision"))
    options.mixed_precision = mixed_precision(given.dictionary("mixed_precision"));
  if (given.has("parameters_to_ignore")) options.parameters_to_ignore = given.texts("parameters_to_ignore");
  if (given.has("delay_all_reduce_named_params")) {
    const auto parameters = net.named_parameters();
    for (const auto& name : given.texts("delay_all_reduce_named_params")) {
      options.delay_all_reduce_named_params.emplace_back(name, parameters[name]);
    }
    options.param_to_hook_all_reduce = parameters[given.text("param_to_hook_all_reduce")];
  }
  return options;
}

void register_hooks(Model& model, const Dictionary& job, const lockstep::ProcessGroup& pairs) {
  register_comm_hook(model, job, pairs);
  if (const auto place = job.text("buffer_hook"); !place.empty()) {
    using Location = lockstep::BufferCommHookLocation;
    model.register_buffer_comm_hook(
        average_buffers, place == "average before" ? Location::kPreForward : Location::kPostForward);
  }
  if (job.flag("in_backward")) {
    model.register_fused_optim([&](auto parameters) { return make_optimizer(job, parameters); });
  }
}

std::vector<torch::Tensor> distinct_parameters(const Net& net) {
  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : net.parameters()) {
    const bool seen = std::any_of(parameters.begin(), parameters.end(),
                                  [&](const torch::Tensor& other) { return other.is_same(parameter); });
    if (!seen) parameters.push_back(parameter);
  }
  return parameters;
}

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const Dictionary& job,
                                                        const std::vector<torch::Tensor>& parameters) {
  const std::string kind = job.text("optimizer");
  if (kind == "adam") {
    return std::make_shared<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-3));
  }
  return std::make_shared<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.05).momentum(kind == "sgd" ? 0.9 : 0));
}

}  // namespace parity

// Runs the communication hooks that hooks_parity_test.py asks for, so that they can be compared with
// PyTorch's.
//
//     lockstep run --nproc-per-node N hooks_parity_driver JOBS OUTPUT
//
// JOBS: a pickled {job name: {"hook": its name, "settings": of its state, "shapes": of the parameters, a list
// for each bucket, "gradients": steps×N×numel, a tensor for each bucket}}. OUTPUT: rank r writes {job name:
// {"results": steps×numel, a tensor for each bucket; for PowerSGD "state", "stats"}} to OUTPUT.r.

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/post_local_sgd_hook.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>
#include <lockstep/parallel/ddp/hooks/quantization_hooks.h>
#include <lockstep/testing/driver.h>

namespace hooks_parity_driver {
namespace {

using lockstep::GradBucket;
using lockstep::HookFuture;
using lockstep::PowerSGDState;
using lockstep::testing::at_key;
using Dictionary = c10::impl::GenericDict;

PowerSGDState powersgd_state(const c10::IValue& settings) {
  lockstep::PowerSGDOptions options;
  const auto set = [&](const char* name, auto& value) {
    const auto entries = settings.toGenericDict();
    const auto found = entries.find(c10::IValue(name));
    if (found == entries.end()) return;
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>) {
      value = found->value().toScalar().toDouble();
    } else {
      value = found->value().to<std::decay_t<decltype(value)>>();
    }
  };
  set("matrix_approximation_rank", options.matrix_approximation_rank);
  set("start_powerSGD_iter", options.start_powerSGD_iter);
  set("min_compression_rate", options.min_compression_rate);
  set("use_error_feedback", options.use_error_feedback);
  set("warm_start", options.warm_start);
  set("orthogonalization_epsilon", options.orthogonalization_epsilon);
  set("random_seed", options.random_seed);
  set("batch_tensors_with_same_shape", options.batch_tensors_with_same_shape);
  return PowerSGDState(nullptr, options);
}

/// Each rank on its own, but 0 and 1 together where there are three.
lockstep::ProcessGroup subgroup() {
  std::vector<std::vector<int>> ranks = {{0}, {1}, {2}};
  ranks.resize(lockstep::get_world_size());
  if (ranks.size() == 3) ranks = {{0, 1}, {2}};
  return lockstep::new_subgroups_by_enumeration(ranks).first;
}

/// A job's hook with its state bound to it.
lockstep::CommunicationHook make_hook(const std::string& name, const c10::IValue& settings,
                                      const PowerSGDState& powersgd) {
  using namespace lockstep;
  const auto bind = [](auto state, auto hook) {
    return [state, hook](GradBucket& bucket) { return hook(state, bucket); };
  };
  if (name == "allreduce") return bind(nullptr, allreduce_hook);
  if (name == "fp16") return bind(nullptr, fp16_compress_hook);
  if (name == "bf16") return bind(nullptr, bf16_compress_hook);
  if (name == "fp16(allreduce)") return bind(nullptr, fp16_compress_wrapper(allreduce_hook));
  if (name == "bf16(allreduce)") return bind(nullptr, bf16_compress_wrapper(allreduce_hook));
  if (name == "noop") return bind(nullptr, noop_hook);
  if (name == "pertensor") return bind(nullptr, quantization_pertensor_hook);
  if (name == "perchannel") {
    return bind(nullptr, QuantizationPerChannelHook{at_key(settings, "bucket_size").toInt()});
  }
  if (name == "powerSGD") return bind(powersgd, powerSGD_hook);
  if (name == "batched_powerSGD") return bind(powersgd, batched_powerSGD_hook);
  if (name == "fp16(powerSGD)") return bind(powersgd, fp16_compress_wrapper(powerSGD_hook));
  if (name == "bf16(powerSGD)") return bind(powersgd, bf16_compress_wrapper(powerSGD_hook));
  TORCH_CHECK(name == "post_localSGD", "no hook is called ", name);
  PostLocalSGDState state(nullptr, subgroup(), at_key(settings, "start_localSGD_iter").toInt(),
                          at_key(settings, "post_local_gradient_allreduce").toBool());
  return bind(state, post_localSGD_hook);
}

Dictionary run(const c10::IValue& job, int rank) {
  const std::string name = at_key(job, "hook").toStringRef();
  const auto settings = at_key(job, "settings");
  const auto shapes = at_key(job, "shapes");
  std::vector<at::Tensor> gradients;
  for (const c10::IValue& of_bucket : at_key(job, "gradients").toListRef()) {
    gradients.push_back(of_bucket.toTensor());
  }
  auto powersgd =
      name.ends_with("powerSGD") || name.ends_with("(powerSGD)") ? powersgd_state(settings) : PowerSGDState();
  auto hook = make_hook(name, settings, powersgd);
  std::vector<std::vector<at::Tensor>> parameters;
  for (size_t bucket = 0; bucket < gradients.size(); ++bucket) {
    auto& list = parameters.emplace_back();
    for (const c10::IValue& shape : shapes.toListRef()[bucket].toListRef()) {
      std::vector<int64_t> sizes;
      for (const c10::IValue& size : shape.toListRef()) sizes.push_back(size.toInt());
      list.push_back(at::zeros(sizes, gradients[bucket].options()));
    }
  }
  const int64_t steps = gradients.front().size(0);
  std::vector<at::Tensor> results;
  for (const at::Tensor& of_bucket : gradients) results.push_back(at::empty_like(of_bucket.select(1, 0)));
  for (int64_t step = 0; step < steps; ++step) {
    if (step == steps / 2 && settings.toGenericDict().contains(c10::IValue("saved"))) {
      // Training goes on with another state, from what this one had saved.
      const auto bytes = torch::pickle_save(powersgd.get_state());
      powersgd = powersgd_state(settings);
      powersgd.set_state(torch::pickle_load(bytes));
      hook = make_hook(name, settings, powersgd);
    }
    // All buckets are on their way at once, as in a backward pass.
    std::vector<at::Tensor> buffers;
    std::vector<HookFuture> futures;
    for (size_t index = 0; index < gradients.size(); ++index) {
      const at::Tensor gradient = gradients[index][step][rank];
      buffers.push_back(index % 2 == 0 ? lockstep::empty_shared(gradient.sizes(), gradient.options())
                                       : at::empty_like(gradient));
      buffers.back().copy_(gradient);
      GradBucket bucket(index, buffers.back(), parameters[index], index + 1 == gradients.size());
      futures.push_back(hook(bucket));
    }
    for (size_t index = 0; index < futures.size(); ++index) {
      futures[index]->waitAndThrow();
      TORCH_CHECK(futures[index]->value().toTensor().data_ptr() == buffers[index].data_ptr(), name,
                  ": the result is not in the bucket");
      results[index][step].copy_(buffers[index]);
    }
  }
  Dictionary answer(c10::StringType::get(), c10::AnyType::get());
  answer.insert("results", results);
  const auto stats = powersgd.compression_stats();
  answer.insert("stats",
                std::vector<double>{stats.compress_rate, static_cast<double>(stats.numel_before_compression),
                                    static_cast<double>(stats.numel_after_compression)});
  answer.insert("state", powersgd.get_state());
  return answer;
}

}  // namespace

LOCKSTEP_DRIVER(hooks_parity_driver) {
  return lockstep::testing::run_jobs(argc, argv, run);
}

}  // namespace hooks_parity_driver

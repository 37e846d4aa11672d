#include <algorithm>
#include <utility>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <lockstep/base/log.h>
#include <lockstep/parallel/ddp/hooks/internal/powersgd_data.h>

namespace lockstep {
namespace {

void check(const PowerSGDOptions& options) {
  TORCH_CHECK_VALUE(!(options.use_error_feedback || options.warm_start) || options.start_powerSGD_iter > 1,
                    "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                    "because PowerSGD can only be applied after the first two iterations in DDP. It is ",
                    options.start_powerSGD_iter, ".");
  TORCH_CHECK_VALUE(options.matrix_approximation_rank >= 1, "Expect `matrix_approximation_rank` >= 1; it is ",
                    options.matrix_approximation_rank, ".");
}

CompressionStats stats_of(const PowerSGDState::Data& data) {
  const auto before = data.total_numel_before_compression, after = data.total_numel_after_compression;
  return {after > 0 ? static_cast<double>(before) / static_cast<double>(after) : 0, before, after};
}

/// {bucket's index: tensor}, of those that have one.
using Tensors = c10::Dict<int64_t, at::Tensor>;

/// A field of the saved state: its name, and how to read it.
template <class Value>
void read(const c10::impl::GenericDict& state, const char* name, Value& value) {
  const auto found = state.find(c10::IValue(name));
  TORCH_CHECK(found != state.end(), "this is no state of PowerSGD: it has no '", name, "'");
  if constexpr (std::is_same_v<Value, double>) {
    value = found->value().toScalar().toDouble();  // Python may have an integer there
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    value = found->value();
  } else {
    value = found->value().to<Value>();
  }
}

/// Calls action(name, field) for the fields that are plain numbers.
template <class Options, class Action>
void for_each_option(Options& options, const Action& action) {
  action("matrix_approximation_rank", options.matrix_approximation_rank);
  action("start_powerSGD_iter", options.start_powerSGD_iter);
  action("min_compression_rate", options.min_compression_rate);
  action("orthogonalization_epsilon", options.orthogonalization_epsilon);
  action("use_error_feedback", options.use_error_feedback);
  action("warm_start", options.warm_start);
  action("batch_tensors_with_same_shape", options.batch_tensors_with_same_shape);
  action("compression_stats_logging_frequency", options.compression_stats_logging_frequency);
}
template <class Data, class Action>
void for_each_count(Data& data, const Action& action) {
  action("iter", data.iter);
  action("total_numel_before_compression", data.total_numel_before_compression);
  action("total_numel_after_compression", data.total_numel_after_compression);
  action("next_stats_report", data.next_stats_report);
}

using Memory = PowerSGDState::Data::Memory;
constexpr std::pair<const char*, at::Tensor Memory::*> kTensors[] = {
    {"error_dict", &Memory::error}, {"p_memory_dict", &Memory::p}, {"q_memory_dict", &Memory::q}};

}  // namespace

PowerSGDState::PowerSGDState(ProcessGroup process_group, const PowerSGDOptions& options) {
  check(options);
  data_ = std::make_shared<Data>(std::move(process_group), options);
  data_->options.compression_stats_logging_frequency =
      std::max<int64_t>(1, options.compression_stats_logging_frequency);
  LOCKSTEP_LOG(kInfo) << "PowerSGD config: matrix_approximation_rank = " << options.matrix_approximation_rank
                      << "; start_powerSGD_iter = " << options.start_powerSGD_iter
                      << "; min_compression_rate = " << options.min_compression_rate
                      << "; orthogonalization_epsilon = " << options.orthogonalization_epsilon
                      << "; use_error_feedback = " << options.use_error_feedback
                      << "; warm_start = " << options.warm_start << "; random_seed = " << options.random_seed
                      << "; compression_stats_logging_frequency = "
                      << options.compression_stats_logging_frequency
                      << "; batch_tensors_with_same_shape = " << options.batch_tensors_with_same_shape;
}

PowerSGDOptions PowerSGDState::options() const {
  std::lock_guard lock(data_->mutex);
  return data_->options;
}

ProcessGroup PowerSGDState::process_group() const {
  std::lock_guard lock(data_->mutex);
  return data_->process_group;
}

void PowerSGDState::set_process_group(ProcessGroup process_group) {
  std::lock_guard lock(data_->mutex);
  data_->process_group = std::move(process_group);
}

int64_t PowerSGDState::iter() const {
  std::lock_guard lock(data_->mutex);
  return data_->iter;
}

CompressionStats PowerSGDState::compression_stats() const {
  std::lock_guard lock(data_->mutex);
  return stats_of(*data_);
}

c10::IValue PowerSGDState::get_state() const {
  std::lock_guard lock(data_->mutex);
  c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
  const auto write = [&](const char* name, const auto& value) { state.insert(std::string(name), value); };
  for_each_option(data_->options, write);
  for_each_count(*data_, write);
  state.insert(std::string("rng"), data_->random.get_state());
  for (const auto& [name, tensor] : kTensors) {
    Tensors tensors;
    for (const auto& [index, memory] : data_->memories) {
      // Copies: training goes on, and a view would be saved with all of its storage.
      if ((memory.*tensor).defined()) tensors.insert(static_cast<int64_t>(index), (memory.*tensor).clone());
    }
    state.insert(std::string(name), tensors);
  }
  return state;
}

void PowerSGDState::set_state(const c10::IValue& state) {
  TORCH_CHECK(state.isGenericDict(), "this is no state of PowerSGD: it is a ", state.tagKind(),
              ", not a dictionary");
  const auto entries = state.toGenericDict();
  Data loaded({}, {});
  loaded.options.random_seed = options().random_seed;  // not saved; the generator is
  const auto read_into = [&](const char* name, auto& value) { read(entries, name, value); };
  for_each_option(loaded.options, read_into);
  check(loaded.options);
  for_each_count(loaded, read_into);
  at::Tensor random;
  read(entries, "rng", random);
  loaded.random.set_state(random);
  for (const auto& [name, tensor] : kTensors) {
    c10::IValue tensors;
    read(entries, name, tensors);
    for (const auto& entry : tensors.toGenericDict()) {
      loaded.memories[static_cast<size_t>(entry.key().toInt())].*tensor = entry.value().toTensor().clone();
    }
  }

  std::lock_guard lock(data_->mutex);
  data_->options = loaded.options;
  data_->random = loaded.random;
  data_->memories = std::move(loaded.memories);
  for_each_count(*data_, [&](const char* name, int64_t& value) { read(entries, name, value); });
}

void PowerSGDState::Data::maybe_increase_iter(bool is_last) {
  std::lock_guard lock(mutex);
  if (!is_last) return;
  ++iter;
  if (iter == options.start_powerSGD_iter) {
    LOCKSTEP_LOG(kInfo) << "Start to apply PowerSGD after " << iter << " iterations.";
  }
}

void PowerSGDState::Data::count(int64_t numel_before, int64_t numel_after, bool is_last) {
  std::lock_guard lock(mutex);
  total_numel_before_compression += numel_before;
  total_numel_after_compression += numel_after;
  if (!is_last || iter < next_stats_report) return;
  const CompressionStats stats = stats_of(*this);
  LOCKSTEP_LOG(kInfo) << "Compression stats: iter " << iter << ", total before compression "
                      << stats.numel_before_compression << ", total after compression "
                      << stats.numel_after_compression << ", rate " << stats.compress_rate;
  next_stats_report = iter + options.compression_stats_logging_frequency;
}

}  // namespace lockstep

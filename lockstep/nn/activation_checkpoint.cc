#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/generator_state.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/activation_checkpoint_count.h>
#include <lockstep/nn/internal/saved_tensor_hooks.h>

namespace lockstep {
namespace {

using nn::internal::SavedTensorHooks;
using nn::internal::SavedTensorHooksScope;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

/// A run of the engine, in which each dropped tensor is computed and used once.
using TaskId = int64_t;

/// The run of the engine in which this thread is; a new one for each use outside of one.
TaskId current_task() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task >= 0) return task;
  static std::atomic<TaskId> outside{-1};
  return outside.fetch_sub(1);
}

/// What autocast does in this thread.
class AutocastState {
 public:
  AutocastState() {
    note(at::kCPU);
    if (const auto device = accelerator(); device && at::autocast::is_autocast_available(*device))
      note(*device);
  }

  void restore() const {
    for (const auto& [type, enabled, dtype] : devices_) {
      at::autocast::set_autocast_enabled(type, enabled);
      at::autocast::set_autocast_dtype(type, dtype);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled_);
  }

 private:
  struct OfDevice {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };

  void note(at::DeviceType type) {
    devices_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }

  std::vector<OfDevice> devices_;
  bool cache_enabled_ = at::autocast::is_autocast_cache_enabled();
};

/// Ends a recomputation that has computed all that is needed.
class RecomputationIsDone final : public std::exception {
 public:
  const char* what() const noexcept override { return "all that backward needs is computed again"; }
};

struct Description {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  explicit Description(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()), device(tensor.device()) {}
  bool operator==(const Description&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Description& description) {
  return out << description.dtype << ' ' << at::IntArrayRef(description.sizes) << " on "
             << description.device;
}

/// A tensor that was dropped: what was computed in its place, by run of the engine. Undefined once it was used.
struct DroppedTensor {
  std::map<TaskId, at::Tensor> recomputed;
};

/// Puts this thread's autocast and, if told, all random number generators back when it goes.
class Surroundings {
 public:
  explicit Surroundings(bool with_generators) {
    if (with_generators) generators_.emplace().take(accelerator_generators());
    at::autocast::increment_nesting();
  }
  Surroundings(const Surroundings&) = delete;
  Surroundings& operator=(const Surroundings&) = delete;
  ~Surroundings() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    autocast_.restore();
    if (generators_) generators_->restore();
  }

 private:
  AutocastState autocast_;
  std::optional<GeneratorStates> generators_;
};

}  // namespace

/// One call of activation_checkpoint(). It lives as long as anything of its graph can be asked for.
class internal::ActivationFrame final : public SavedTensorHooks,
                                        public std::enable_shared_from_this<internal::ActivationFrame> {
 public:
  ActivationFrame(const ActivationCheckpointOptions& options, const std::vector<at::Tensor>& inputs,
                  ActivationScope::Recompute recompute)
      : options_(options), recompute_(std::move(recompute)) {
    // Through the hooks of the checkpoint around this one, if there is one.
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
    if (options_.preserve_rng_state) generators_.take(accelerator_generators());
  }

  std::unique_ptr<SavedVariableHooks> make_hooks() override;
  void complete() {
    const std::lock_guard lock(mutex_);
    completed_ = true;
  }

  std::shared_ptr<DroppedTensor> drop(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    auto dropped = std::make_shared<DroppedTensor>();
    dropped_.push_back(dropped);
    if (options_.determinism_check) descriptions_.emplace_back(tensor);
    const at::Tensor source =
        tensor.is_view() ? at::Tensor(tensor._base()) : tensor;  // linear() saves weight.t()
    if (source.is_leaf() && source.requires_grad()) parameters_.emplace_back(source, source._version());
    return dropped;
  }

  at::Tensor value_of(DroppedTensor& dropped) {
    // A graph over several devices is run by several threads.
    const std::lock_guard lock(mutex_);
    const TaskId task = current_task();
    auto found = dropped.recomputed.find(task);
    if (found == dropped.recomputed.end()) {
      recompute(task);
      found = dropped.recomputed.find(task);
      TORCH_CHECK(found != dropped.recomputed.end(), kDiffers,
                  "fewer tensors were saved during recomputation");
    }
    TORCH_CHECK(found->second.defined(),
                "activation_checkpoint: a tensor that was computed again is asked for a second time within "
                "one backward; "
                "a Function's backward() may call get_saved_variables() once");
    return std::exchange(found->second, at::Tensor());
  }

 private:
  class Recomputation;
  class Dropping;
  class Keeping;
  static constexpr const char* kDiffers =
      "activation_checkpoint: the function did something else when backward ran it again: ";

  // All under the mutex, but the constructor:
  void recompute(TaskId task);
  void check_parameters() const;
  void check_same(TaskId task, size_t saved) const;

  const ActivationCheckpointOptions options_;
  const ActivationScope::Recompute recompute_;
  std::vector<SavedVariable> inputs_;
  const AutocastState autocast_;
  GeneratorStates generators_;

  std::mutex mutex_;  // taken before that of a checkpoint around this one
  bool completed_ = false;
  bool ran_before_completed_ = false;                  // backward within the function
  std::vector<std::weak_ptr<DroppedTensor>> dropped_;  // in order
  std::vector<Description> descriptions_;
  std::vector<std::pair<at::Tensor, uint32_t>> parameters_;  // and their versions
};

namespace {
using internal::ActivationFrame;
thread_local int64_t checkpoint_count = 0;
}  // namespace

/// Where a recomputation puts what its operations save.
class ActivationFrame::Recomputation final : public SavedTensorHooks {
 public:
  Recomputation(ActivationFrame& frame, TaskId task) : frame_(frame), task_(task) {}

  std::unique_ptr<SavedVariableHooks> make_hooks() override;
  bool is_done() const { return is_done_; }
  size_t saved() const { return saved_; }

  at::Tensor keep(const at::Tensor& tensor) {
    at::Tensor value = tensor.requires_grad() ? tensor.detach() : tensor;
    const size_t index = saved_++;
    if (index >= frame_.dropped_.size()) {
      TORCH_CHECK(!frame_.completed_, kDiffers,
                  "trying to save more tensors during recomputation than during the original forward pass");
      frame_.ran_before_completed_ = true;
      return value;
    }
    // Gone are those of graphs that are not there any more.
    if (const auto dropped = frame_.dropped_[index].lock()) dropped->recomputed[task_] = value;
    if (frame_.options_.early_stop && saved_ == frame_.dropped_.size()) {
      is_done_ = true;
      throw RecomputationIsDone();
    }
    return value;
  }

 private:
  ActivationFrame& frame_;
  const TaskId task_;
  size_t saved_ = 0;
  bool is_done_ = false;
};

/// Of a tensor saved in the function's first run.
class ActivationFrame::Dropping final : public SavedVariableHooks {
 public:
  explicit Dropping(std::shared_ptr<ActivationFrame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override { dropped_ = frame_->drop(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->value_of(*dropped_); }

 private:
  std::shared_ptr<ActivationFrame> frame_;
  std::shared_ptr<DroppedTensor> dropped_;
};

/// Of a tensor saved when it runs again. That graph is needed only for a backward within the function.
class ActivationFrame::Keeping final : public SavedVariableHooks {
 public:
  explicit Keeping(Recomputation& recomputation) : recomputation_(recomputation) {}
  void call_pack_hook(const at::Tensor& tensor) override { tensor_ = recomputation_.keep(tensor); }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Recomputation& recomputation_;  // there while packing
  at::Tensor tensor_;
};

std::unique_ptr<SavedVariableHooks> ActivationFrame::make_hooks() {
  return std::make_unique<Dropping>(shared_from_this());
}

std::unique_ptr<SavedVariableHooks> ActivationFrame::Recomputation::make_hooks() {
  return std::make_unique<Keeping>(*this);
}

void ActivationFrame::recompute(TaskId task) {
  check_parameters();
  std::vector<at::Tensor> inputs;
  for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());
  Recomputation recomputation(*this, task);
  {
    const Surroundings surroundings(options_.preserve_rng_state);
    if (options_.preserve_rng_state) generators_.restore();
    autocast_.restore();
    const c10::AutoGradMode with_gradients(true);
    const SavedTensorHooksScope hooks(recomputation);
    try {
      recompute_(inputs);
    } catch (...) {
      // Whatever the way has made of RecomputationIsDone; TorchScript's interpreter throws an error of its own.
      if (!recomputation.is_done()) throw;
    }
  }
  check_same(task, recomputation.saved());
}

void ActivationFrame::check_parameters() const {
  for (const auto& [parameter, version] : parameters_) {
    TORCH_CHECK(
        parameter._version() == version,
        "one of the variables needed for gradient computation has been modified by an inplace operation: [",
        parameter.toString(), " ", parameter.sizes(), "] is at version ", parameter._version(),
        "; expected version ", version,
        " instead. It is a parameter that a function under activation_checkpoint() has used, which backward "
        "now "
        "has to run again.");
  }
}

void ActivationFrame::check_same(TaskId task, size_t saved) const {
  if (ran_before_completed_) return;
  TORCH_CHECK(saved == dropped_.size(), kDiffers, "it saved ", saved, " tensors instead of ",
              dropped_.size());
  if (!options_.determinism_check) return;
  std::ostringstream differences;
  for (size_t i = 0; i < dropped_.size(); ++i) {
    const auto dropped = dropped_[i].lock();
    if (!dropped) continue;
    const Description now(dropped->recomputed.at(task));
    if (!(now == descriptions_[i])) {
      differences << (differences.tellp() > 0 ? "; " : "") << "the tensor at position " << i << " was "
                  << descriptions_[i] << " and is " << now << " now";
    }
  }
  TORCH_CHECK(differences.str().empty(), kDiffers, differences.str());
}

// ---- The scope

struct internal::ActivationScope::State {
  std::shared_ptr<ActivationFrame> frame;
  SavedTensorHooksScope hooks{*frame};
};

internal::ActivationScope::ActivationScope(const ActivationCheckpointOptions& options,
                                           const std::vector<at::Tensor>& inputs, Recompute recompute)
    : state_(new State{.frame = std::make_shared<ActivationFrame>(options, inputs, std::move(recompute))}) {
  ++checkpoint_count;
}

internal::ActivationScope::~ActivationScope() = default;

int64_t activation_checkpoint_count() {
  return checkpoint_count;
}

void internal::ActivationScope::complete() {
  state_->frame->complete();
}

at::Tensor internal::placeholder() {
  return at::empty({0});
}

}  // namespace lockstep

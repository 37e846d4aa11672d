#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/streams.h>
#include <lockstep/nn/step_snapshot.h>

namespace lockstep {

struct StepSnapshot::Random {
  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

StepSnapshot::StepSnapshot(std::vector<at::Device> devices)
    : devices_(std::move(devices)), random_(std::make_unique<Random>()) {}
StepSnapshot::~StepSnapshot() = default;

void StepSnapshot::take(const std::vector<NamedTensor>& buffers) {
  taken_ = true;
  {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    *random_ = {cpu->engine(), cpu->next_float_normal_sample(), cpu->next_double_normal_sample()};
  }
  device_random_.clear();
  for (const at::Device& device : devices_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard lock(generator.mutex());
    device_random_.push_back(generator.get_state());
  }
  at::NoGradGuard no_grad;
  buffers_.clear();
  for (const auto& [name, buffer] : buffers) {
    if (buffer.defined()) buffers_.emplace_back(buffer, buffer.clone());
  }
}

void StepSnapshot::restore() {
  if (!taken_) return;
  taken_ = false;
  // A failed backward ends without ordering its streams before the caller's: what is still under way on any
  // of them must not write after this.
  for (const at::Device& device : devices_) synchronize(device);
  {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    cpu->set_engine(random_->engine);
    cpu->set_next_float_normal_sample(random_->next_float);
    cpu->set_next_double_normal_sample(random_->next_double);
  }
  for (size_t i = 0; i < device_random_.size(); ++i) {
    at::Generator generator = at::globalContext().defaultGenerator(devices_[i]);
    std::lock_guard lock(generator.mutex());
    generator.set_state(device_random_[i]);
  }
  at::NoGradGuard no_grad;
  for (auto& [buffer, values] : buffers_) buffer.copy_(values);
  // The caller's next step may use another stream than this thread's.
  for (const at::Device& device : devices_) internal::current_stream(device)->synchronize();
  buffers_.clear();
}

void StepSnapshot::drop() {
  taken_ = false;
  buffers_.clear();
}

}  // namespace lockstep

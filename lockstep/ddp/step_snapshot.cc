#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/ddp/step_snapshot.h>

namespace lockstep {

struct StepSnapshot::Random {
  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

StepSnapshot::StepSnapshot() : random_(std::make_unique<Random>()) {}
StepSnapshot::~StepSnapshot() = default;

void StepSnapshot::take(const std::vector<NamedTensor>& buffers) {
  taken_ = true;
  {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    *random_ = {cpu->engine(), cpu->next_float_normal_sample(), cpu->next_double_normal_sample()};
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
  {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    cpu->set_engine(random_->engine);
    cpu->set_next_float_normal_sample(random_->next_float);
    cpu->set_next_double_normal_sample(random_->next_double);
  }
  at::NoGradGuard no_grad;
  for (auto& [buffer, values] : buffers_) buffer.copy_(values);
  buffers_.clear();
}

void StepSnapshot::drop() {
  taken_ = false;
  buffers_.clear();
}

}  // namespace lockstep

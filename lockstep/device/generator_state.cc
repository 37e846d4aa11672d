#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/generator_state.h>

namespace lockstep {

std::vector<at::Generator> accelerator_generators() {
  std::vector<at::Generator> generators;
  const int count = accelerator_count();
  for (int index = 0; index < count; ++index) {
    generators.push_back(
        at::globalContext().defaultGenerator({*accelerator(), static_cast<c10::DeviceIndex>(index)}));
  }
  return generators;
}

at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// The fields of at::CPUGeneratorImpl: get_state() would make a tensor of them, which takes longer.
struct GeneratorStates::CpuState {
  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

GeneratorStates::GeneratorStates() = default;
GeneratorStates::~GeneratorStates() = default;

void GeneratorStates::take(const std::vector<at::Generator>& others) {
  if (!cpu_) cpu_ = std::make_unique<CpuState>();
  {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    *cpu_ = {cpu->engine(), cpu->next_float_normal_sample(), cpu->next_double_normal_sample()};
  }
  others_.clear();
  for (const auto& generator : others) others_.emplace_back(generator, generator_state(generator));
}

void GeneratorStates::restore() const {
  if (cpu_) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    cpu->set_engine(cpu_->engine);
    cpu->set_next_float_normal_sample(cpu_->next_float);
    cpu->set_next_double_normal_sample(cpu_->next_double);
  }
  for (const auto& [generator, state] : others_) set_generator_state(generator, state);
}

}  // namespace lockstep

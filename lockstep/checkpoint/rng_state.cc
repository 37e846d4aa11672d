#include <algorithm>
#include <mutex>
#include <vector>
#include <zlib.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/mix_bits.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/device/generator_state.h>

namespace lockstep {
namespace {

at::Generator cpu_generator() {
  return at::detail::getDefaultCPUGenerator();
}

/// Under which the devices' states are saved: "cuda".
std::string key_of_devices() {
  return c10::DeviceTypeName(accelerator().value_or(c10::kCUDA), /*lower_case=*/true);
}

/// Python's torch.ByteTensor on the CPU.
at::Tensor bytes_at(const c10::IValue& value, const std::string& key) {
  const auto bytes = from_object<at::Tensor>(value);
  TORCH_CHECK_VALUE(bytes.defined() && bytes.scalar_type() == at::kByte && bytes.dim() == 1,
                    "set_rng_state: '", key,
                    "' is not the state of a generator, which is a flat uint8 tensor");
  TORCH_CHECK_VALUE(bytes.nbytes() <= bytes.storage().nbytes(), "set_rng_state: '", key,
                    "' is larger than its memory");
  return bytes.cpu().contiguous();
}

}  // namespace

StateDict get_rng_state() {
  StateDict state{{"cpu", generator_state(cpu_generator())}};
  std::vector<at::Tensor> of_devices;
  for (const at::Generator& generator : accelerator_generators())
    of_devices.push_back(generator_state(generator));
  if (!of_devices.empty()) state[key_of_devices()] = to_object(of_devices);
  return state;
}

void set_rng_state(const StateDict& state) {
  const at::Tensor cpu = bytes_at(state_value<c10::IValue>(state, "cpu", "RngState"), "cpu");
  std::vector<at::Tensor> of_devices;
  const std::string key = key_of_devices();
  if (state.contains(key)) {
    for (const auto& value : state_value<std::vector<c10::IValue>>(state, key, "RngState")) {
      of_devices.push_back(bytes_at(value, key));
    }
  }
  const auto generators = accelerator_generators();
  if (state.contains(key) && of_devices.size() != generators.size()) {
    LOCKSTEP_LOG(kWarning) << "the random numbers' state is that of " << of_devices.size() << " " << key
                           << " devices, here are " << generators.size();
  }
  GeneratorStates before;
  before.take(generators);
  try {
    set_generator_state(cpu_generator(), cpu);  // checks the bytes
    for (size_t i = 0; i < std::min(of_devices.size(), generators.size()); ++i) {
      set_generator_state(generators[i], of_devices[i]);
    }
  } catch (const std::exception& error) {
    before.restore();
    TORCH_CHECK_VALUE(false, "set_rng_state: not the state of a generator: ", text_of(error));
  }
}

int64_t rng_fingerprint() {
  const at::Tensor bytes = generator_state(cpu_generator()).contiguous();
  return static_cast<int64_t>(crc32_z(0, bytes.const_data_ptr<uint8_t>(), bytes.nbytes()));
}

void derive_rng_state(int64_t fingerprint, int64_t rank, int64_t world_size) {
  const uint64_t place = mix_bits(static_cast<uint64_t>(world_size)) ^ static_cast<uint64_t>(rank);
  const uint64_t seed = mix_bits(static_cast<uint64_t>(fingerprint) ^ mix_bits(place));
  auto generators = accelerator_generators();
  generators.insert(generators.begin(), cpu_generator());
  for (at::Generator& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

}  // namespace lockstep

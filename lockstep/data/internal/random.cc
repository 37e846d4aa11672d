#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <lockstep/data/internal/random.h>
#include <lockstep/device/generator_state.h>

namespace lockstep::data::internal {

at::Generator make_generator(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

std::vector<int64_t> to_vector(const at::Tensor& numbers) {
  const int64_t* first = numbers.const_data_ptr<int64_t>();
  return {first, first + numbers.numel()};
}

std::vector<int64_t> random_permutation(int64_t size, const std::optional<at::Generator>& generator) {
  return to_vector(at::randperm(size, generator, at::TensorOptions().dtype(at::kLong)));
}

int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::TensorOptions().dtype(at::kLong)).random_(generator).item<int64_t>();
}

at::Generator RandomSource::begin() {
  if (loaded_) {
    loaded_ = false;
    if (given_) {
      set_generator_state(*given_, before_);
      return *given_;
    }
    auto copy = make_generator(0);
    set_generator_state(copy, before_);
    return copy;
  }
  at::Generator generator = given_ ? *given_ : at::detail::getDefaultCPUGenerator();
  before_ = generator_state(generator);
  return generator;
}

StateDict RandomSource::state_dict() const {
  if (before_.defined()) return {{"generator", before_.clone()}};
  if (given_) return {{"generator", generator_state(*given_)}};
  return {};
}

void RandomSource::load_state_dict(const StateDict& state, const std::string& owner) {
  if (state.empty() && !given_) {
    before_ = at::Tensor();
    loaded_ = false;
    return;
  }
  const auto saved = state_value<at::Tensor>(state, "generator", owner);
  auto trial = make_generator(0);
  try {
    set_generator_state(trial, saved);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, owner, "::load_state_dict: 'generator' is not the state of a CPU generator: ",
                      error.what_without_backtrace());
  }
  before_ = saved.clone();
  loaded_ = true;
}

}  // namespace lockstep::data::internal

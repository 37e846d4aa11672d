#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include <lockstep/testing/simulated_device/generator.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/simulated_device/streams.h>

namespace lockstep::testing::simulated {
namespace {

class SimulatedGenerator final : public c10::GeneratorImpl {
 public:
  SimulatedGenerator(c10::DeviceIndex index, at::Generator host)
      : GeneratorImpl(c10::Device(c10::kPrivateUse1, index),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override { host_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  SimulatedGenerator* clone_impl() const override {
    return new SimulatedGenerator(device().index(), host_.clone());
  }

  at::Generator host_;
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex index) {
  return at::make_generator<SimulatedGenerator>(index == -1 ? current_device() : index,
                                                at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (c10::DeviceIndex each = 0; each < kDevices; ++each) all->push_back(make_generator(each));
    return all;
  }();
  return generators->at(index == -1 ? current_device() : index);
}

at::Generator host_generator(const at::Generator& generator) {
  const auto* simulated = dynamic_cast<const SimulatedGenerator*>(generator.unsafeGetGeneratorImpl());
  return simulated == nullptr ? generator : simulated->host();
}

}  // namespace lockstep::testing::simulated

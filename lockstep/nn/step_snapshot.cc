#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/streams.h>
#include <lockstep/nn/step_snapshot.h>

namespace lockstep {

StepSnapshot::StepSnapshot(std::vector<at::Device> devices) : devices_(std::move(devices)) {}

void StepSnapshot::take(const std::vector<NamedTensor>& buffers) {
  taken_ = true;
  std::vector<at::Generator> generators;
  for (const at::Device& device : devices_)
    generators.push_back(at::globalContext().defaultGenerator(device));
  random_.take(generators);
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
  random_.restore();
  at::NoGradGuard no_grad;
  for (auto& [buffer, values] : buffers_) buffer.copy_(values);
  // The caller's next step may use another stream than this thread's.
  for (const at::Device& device : devices_) current_stream(device)->synchronize();
  buffers_.clear();
}

void StepSnapshot::drop() {
  taken_ = false;
  buffers_.clear();
}

}  // namespace lockstep

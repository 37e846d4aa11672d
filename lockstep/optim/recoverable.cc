#include <optional>
#include <sstream>

#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <lockstep/optim/recoverable.h>

namespace lockstep {
namespace {

/// The device that all parameters are on; nothing if there are several.
std::optional<at::Device> only_device(const torch::optim::Optimizer& optimizer) {
  std::optional<at::Device> device;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (device && *device != parameter.device()) return std::nullopt;
      device = parameter.device();
    }
  }
  return device;
}

}  // namespace

Recoverable::Recoverable(torch::optim::Optimizer& optimizer)
    : save_([&optimizer] {
        torch::serialize::OutputArchive archive;
        optimizer.save(archive);
        std::ostringstream stream;
        archive.save_to(stream);
        return stream.str();
      }),
      load_([&optimizer](const std::string& bytes) {
        std::istringstream stream(bytes);
        torch::serialize::InputArchive archive;
        // The sender's device may have another number.
        archive.load_from(stream, only_device(optimizer));
        optimizer.load(archive);
      }) {}

}  // namespace lockstep

// Any bytes as a manifest, followed by their right checksum, without which no input would be parsed: a
// manifest that can be written and read again, or a CheckpointError.
#include <cstdlib>
#include <string>
#include <vector>

#include <lockstep/checkpoint/internal/checksum.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::manifest_fuzz {
namespace {

std::vector<std::string> seeds() {
  using namespace checkpoint::internal;
  Manifest manifest;
  manifest.info = {.step = 5, .epoch = 1, .metrics = {{"loss", 0.5}, {"nan", 0.0 / 1}}, .emergency = "x"};
  manifest.info.world_size = 2;
  manifest.info.saved_at = std::chrono::system_clock::time_point(std::chrono::seconds(1'700'000'000));
  manifest.ranks = {0, 1};
  const std::string sum = checksum_of("x");
  manifest.files = {{"model.safetensors", 100, sum}, {"state.json", 20, sum}};
  manifest.tensors = {
      {"model", "w", "model.safetensors", "F32", {2, 3}, 8, 24, sum},
      {"rank00001",
       "v",
       "model.safetensors",
       "F32",
       {2, 3},
       32,
       24,
       sum,
       serialization::TensorPart{.global_shape = {7, 3}, .offsets = {5, 0}, .mesh_dim = "shard"}}};
  const std::string text = to_text(manifest);
  const std::string body = text.substr(0, text.rfind(",\n\"checksum\""));
  return {body, "{\n\"format\": \"lockstep-checkpoint\""};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(manifest, seeds) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  try {
    checkpoint::internal::parse_manifest(body, "input");
  } catch (const CheckpointError&) {
  }
  checkpoint::internal::Manifest manifest;
  try {
    manifest = checkpoint::internal::parse_manifest(
        body + ",\n\"checksum\": \"" + checkpoint::internal::checksum_of(body) + "\"\n}\n", "input");
  } catch (const CheckpointError&) {
    return 0;
  }
  const auto text = checkpoint::internal::to_text(manifest);
  if (checkpoint::internal::to_text(checkpoint::internal::parse_manifest(text, "again")) != text)
    std::abort();
  return 0;
}

}  // namespace lockstep::manifest_fuzz

#include <lockstep/parallel/pipeline/pipe.h>

namespace lockstep {

Pipe::Pipe(const torch::nn::Sequential& module, const std::vector<int64_t>& balance, PipeOptions options)
    : torch::nn::Module("Pipe"), core_(module, balance, std::move(options)) {
  for (const auto& child : module->named_children()) register_module(child.key(), child.value());
}

}  // namespace lockstep

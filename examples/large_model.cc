// Trains a model whose weights take more than half of the machine's memory, with AdamW, on all ranks of one host: it is
// built without values on each rank, its weights lie once in bfloat16, and what only a step of the optimizer needs
// (weights and state in full precision) is in files.
//
//     lockstep run --nproc-per-node 2 ./large_model --offload /somewhere/on/a/disk
//
// The files take 14 bytes for each parameter. What memory has no room for, the kernel writes to the disk and reads again, so a
// model that is larger than memory makes slow steps, and a fast disk helps.
#include <algorithm>
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
namespace fsdp = lockstep::fsdp;

struct Settings {
  double share = 0.55;
  double memory_mib = 0;
  int64_t layers = 0;
  int64_t width = 2048;
  int64_t steps = 20;
  int64_t batch_size = 32;
  double learning_rate = 1e-4;
  std::string offload;
};

/// x + down(gelu(up(norm(x)))).
struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

/// Keeps of its blocks what goes in; the rest is computed again in backward.
struct NetImpl : nn::Module {
  NetImpl(int64_t width, int64_t layers) {
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) {
      x = lockstep::activation_checkpoint({}, Block(std::dynamic_pointer_cast<BlockImpl>(block)), x);
    }
    return x;
  }
  nn::ModuleList blocks = register_module("blocks", nn::ModuleList());
};
TORCH_MODULE(Net);

/// LibTorch's, but a block adds nothing to begin with, however many there are.
void set_values(nn::Module& module) {
  fsdp::reset_parameters(module);
  const auto* linear = module.as<nn::LinearImpl>();
  if (linear == nullptr || linear->options.in_features() < linear->options.out_features()) return;
  nn::init::zeros_(linear->weight);
  nn::init::zeros_(linear->bias);
}

/// Bytes that this machine, or the control group, has for programs; rank 0's count.
int64_t memory_of_job(const Settings& settings) {
  if (settings.memory_mib > 0) return static_cast<int64_t>(settings.memory_mib * (1 << 20));
  const auto limits = lockstep::read_memory_limits();
  auto bytes = torch::tensor({std::min(limits.available, limits.cgroup_left)});
  lockstep::broadcast(bytes, 0);
  return bytes.item<int64_t>();
}

int64_t parameters_of_block(int64_t width) {
  return 8 * width * width + 7 * width;
}

void train(const Settings& settings) {
  auto world = lockstep::init_process_group();
  const int64_t memory = memory_of_job(settings);
  const int64_t of_block = parameters_of_block(settings.width);
  const auto wanted = static_cast<int64_t>(settings.share * static_cast<double>(memory) / sizeof(float));
  const int64_t layers =
      settings.layers > 0 ? settings.layers : std::max<int64_t>(1, (wanted + of_block - 1) / of_block);

  torch::manual_seed(0);  // rank 0's values are those of all
  Net net = nullptr;
  {
    const lockstep::MetaDeviceGuard without_values;
    net = Net(settings.width, layers);
  }
  lockstep::FullyShardedDataParallel model(
      net, {.auto_wrap_policy = fsdp::module_wrap_policy<BlockImpl>(),
            .mixed_precision = {.param_dtype = torch::kBFloat16, .keep_low_precision_grads = true},
            .param_init_fn = set_values,
            .device_id = torch::kCPU,
            .cpu_offload = {.offload_params = true, .directory = settings.offload}});
  auto optimizer =
      model.make_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(settings.learning_rate));
  if (world.rank() == 0) {
    std::printf("%lld blocks, %lld parameters: weights in full precision are %.2f of the memory\n",
                static_cast<long long>(layers), static_cast<long long>(layers * of_block),
                static_cast<double>(layers * of_block * static_cast<int64_t>(sizeof(float))) /
                    static_cast<double>(memory));
    std::fflush(stdout);
  }

  torch::manual_seed(1 + world.rank());
  for (int64_t step = 0; step < settings.steps; ++step) {
    optimizer->zero_grad();
    const auto x = torch::randn({settings.batch_size / world.size(), settings.width});
    auto loss = nn::functional::mse_loss(model(x).to(torch::kFloat), 2 * x);
    loss.backward();
    model.clip_grad_norm_(1.0);
    optimizer->step();
    auto mean = loss.detach();
    lockstep::all_reduce(mean, lockstep::ReduceOp::AVG);
    if (world.rank() != 0) continue;
    std::printf("step %lld: loss %.4f\n", static_cast<long long>(step + 1), mean.item<double>());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a model as large as a share of the memory, in shards that lie in files. Start it with: "
      "lockstep "
      "run --nproc-per-node N large_model …");
  app.add_option("--share", settings.share, "of the memory that the weights would take in full precision")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--memory-mib", settings.memory_mib, "take this for the memory, instead of what is free")
      ->check(CLI::PositiveNumber);
  app.add_option("--layers", settings.layers, "blocks, whatever the share is")->check(CLI::PositiveNumber);
  app.add_option("--width", settings.width, "of the model")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", settings.steps, "of the optimizer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.learning_rate)->capture_default_str();
  app.add_option("--offload", settings.offload,
                 "a folder on a disk for the files; $TMPDIR or /tmp unless given");
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "large_model: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "large_model: " << error.what() << std::endl;
  return 1;
}

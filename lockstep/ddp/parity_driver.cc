// Trains what ddp_parity_test.py asks for and writes the weights, so that they can be compared with
// PyTorch's.
//
//     lockstep run --nproc-per-node N ddp_parity_driver JOBS OUTPUT
//
// JOBS: a pickled {job name: {"model": mlp|cnn, "weights": {name: tensor}, "inputs": steps×N·B×…, "targets":
// steps×N·B}}. OUTPUT: rank r writes {job name: {name: tensor}} to OUTPUT.r.
#include <fstream>
#include <iostream>
#include <iterator>

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/ddp/distributed_data_parallel.h>

namespace {

namespace nn = torch::nn;
using Tensors = c10::Dict<std::string, at::Tensor>;

struct Mlp : nn::Module {
  Mlp() { register_module("fc1", fc1), register_module("fc2", fc2); }
  torch::Tensor forward(const torch::Tensor& x) { return fc2(torch::relu(fc1(x.flatten(1)))); }
  nn::Linear fc1{64, 48};
  nn::Linear fc2{48, 10};
};

struct Cnn : nn::Module {
  Cnn() {
    register_module("conv1", conv1), register_module("bn1", bn1), register_module("conv2", conv2);
    register_module("bn2", bn2), register_module("fc", fc);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::relu(bn1(conv1(x.view({-1, 1, 8, 8}))));
    y = torch::relu(bn2(conv2(y)));
    return fc(torch::max_pool2d(y, 2).flatten(1));
  }
  nn::Conv2d conv1{nn::Conv2dOptions(1, 6, 3).padding(1)};
  nn::BatchNorm2d bn1{6};
  nn::Conv2d conv2{nn::Conv2dOptions(6, 8, 3).padding(1).bias(false)};
  nn::BatchNorm2d bn2{8};
  nn::Linear fc{8 * 4 * 4, 10};
};

/// An unpickled dictionary knows no types of keys and values.
c10::IValue at_key(const c10::IValue& dictionary, const std::string& key) {
  return dictionary.toGenericDict().at(c10::IValue(key));
}

template <class Net>
Tensors train(const c10::IValue& job, int rank, int world_size) {
  const at::Tensor inputs = at_key(job, "inputs").toTensor();
  const at::Tensor targets = at_key(job, "targets").toTensor();
  auto net = std::make_shared<Net>();
  net->to(inputs.scalar_type());
  {
    torch::NoGradGuard no_grad;
    const auto weights = at_key(job, "weights");
    for (auto& item : net->named_parameters()) item.value().copy_(at_key(weights, item.key()).toTensor());
    for (auto& item : net->named_buffers()) item.value().copy_(at_key(weights, item.key()).toTensor());
  }
  // Small buckets, so that there are several.
  lockstep::DistributedDataParallel<Net> model(net, {.bucket_cap_mb = 0.005, .first_bucket_cap_mb = 0.001});
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const int64_t batch = inputs.size(1) / world_size;
  for (int64_t step = 0; step < inputs.size(0); ++step) {
    optimizer.zero_grad();
    const auto x = inputs[step].narrow(0, rank * batch, batch);
    const auto y = targets[step].narrow(0, rank * batch, batch);
    nn::functional::cross_entropy(model(x), y).backward();
    optimizer.step();
  }
  Tensors result;
  for (const auto& item : net->named_parameters()) result.insert(item.key(), item.value().detach().clone());
  for (const auto& item : net->named_buffers()) result.insert(item.key(), item.value().clone());
  return result;
}

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "can't read ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3, "usage: ddp_parity_driver JOBS OUTPUT");
  auto world = lockstep::init_process_group();
  const auto jobs = torch::pickle_load(read_file(argv[1])).toGenericDict();
  c10::Dict<std::string, Tensors> results;
  for (const auto& entry : jobs) {
    const bool mlp = at_key(entry.value(), "model").toStringRef() == "mlp";
    results.insert(entry.key().toStringRef(), mlp ? train<Mlp>(entry.value(), world.rank(), world.size())
                                                  : train<Cnn>(entry.value(), world.rank(), world.size()));
  }
  const auto bytes = torch::pickle_save(results);
  std::ofstream(std::string(argv[2]) + "." + std::to_string(world.rank()), std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
} catch (const std::exception& error) {
  std::cerr << "ddp_parity_driver: " << error.what() << std::endl;
  return 1;
}

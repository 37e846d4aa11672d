// Trains what fsdp_parity_test.py asks for in shards, and writes the weights.
//
//     lockstep run --nproc-per-node N fsdp_parity_driver JOBS OUTPUT
//
// JOBS: {name: job}, pickled. OUTPUT: rank r writes {name: {parameter or buffer: tensor, "norms": tensor, "losses": tensor}} to
// OUTPUT.r, and under "NAME, gathered" the same of training in which parameters are gathered. Of a nested job it writes
// {parameter: number of its group} under "NAME, groups".
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/parallel/ddp/parity/dictionary.h>
#include <lockstep/parallel/ddp/parity/models.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>

namespace {

using parity::Dictionary;
using Model = lockstep::FullyShardedDataParallel<parity::Net>;
using Tensors = c10::Dict<std::string, at::Tensor>;

/// The model "mlp", two layers of which are wrapped themselves.
struct NestedMlp : parity::Net {
  using Layer = lockstep::FullyShardedDataParallel<torch::nn::LinearImpl>;

  NestedMlp(parity::Net& mlp, const lockstep::FullyShardedDataParallelOptions& options)
      : fc1(std::make_shared<Layer>(layer(mlp, "fc1"), options)),
        fc2(std::make_shared<Layer>(layer(mlp, "fc2"), options)),
        fc3(layer(mlp, "fc3")) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("fc3", fc3);
  }
  std::vector<at::Tensor> forward(const at::Tensor& x, int64_t) override {
    auto y = torch::tanh(fc1->forward(x));
    note_what_is_whole();
    y = torch::tanh(fc2->forward(y));
    note_what_is_whole();
    y = fc3->forward(y);
    note_what_is_whole();
    return {y};
  }

  std::vector<lockstep::NamedTensor> parameters_of_all;  // set once all are wrapped
  Tensors groups;  // where they are gathered: in the order in which they were whole first

 private:
  static std::shared_ptr<torch::nn::LinearImpl> layer(parity::Net& mlp, const char* name) {
    return std::dynamic_pointer_cast<torch::nn::LinearImpl>(mlp.named_children()[name]);
  }
  void note_what_is_whole() {
    for (const auto& [name, parameter] : parameters_of_all) {
      const auto& data = parameter.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
      if (data.get() != nullptr && !groups.contains(name)) groups.insert(name, torch::tensor(layers_));
    }
    ++layers_;
  }

  std::shared_ptr<Layer> fc1, fc2;
  std::shared_ptr<torch::nn::LinearImpl> fc3;
  int64_t layers_ = 0;  // that have computed
};

std::shared_ptr<parity::Net> make_plain_net(const Dictionary& job) {
  auto net = parity::make_net(job.text("model"));
  const auto weights = job.dictionary("weights");
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.set_data(parameter.to(at::kDouble));
  for (auto& buffer : net->buffers()) {  // not net->to(), which makes numbers of masks, too
    if (buffer.is_floating_point()) buffer.set_data(buffer.to(at::kDouble));
  }
  for (auto& item : net->named_parameters()) item.value().copy_(weights.tensor(item.key()));
  for (auto& item : net->named_buffers()) item.value().copy_(weights.tensor(item.key()));
  return net;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Dictionary& job, Model& model) {
  if (job.text("optimizer") == "adamw") {
    return model.make_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  }
  return model.make_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9));
}

/// Adds to `results`.
void train(const Dictionary& job, const std::string& name, int rank, int ranks, bool gather,
           c10::Dict<std::string, Tensors>& results) {
  const auto min_num_params = job.integer("min_num_params");
  const lockstep::FullyShardedDataParallelOptions options{
      .auto_wrap_policy = min_num_params > 0 ? lockstep::fsdp::size_based_auto_wrap_policy(min_num_params)
                                             : lockstep::fsdp::AutoWrapPolicy(),
      .gather = gather,
      .forward_prefetch = gather};
  auto net = make_plain_net(job);
  std::shared_ptr<NestedMlp> nested;
  if (job.integer("nested") != 0) net = nested = std::make_shared<NestedMlp>(*net, options);
  Model model(net, options);
  if (nested && gather) nested->parameters_of_all = model.module_parameters();
  const auto optimizer = make_optimizer(job, model);
  const auto inputs = job.tensor("inputs"), targets = job.tensor("targets");
  const int64_t batch = inputs.size(1) / ranks, count = job.integer("accumulate");
  const double max_norm = job.number("max_norm");
  std::vector<double> norms, losses;
  for (int64_t index = 0; index < inputs.size(0); ++index) {
    const bool last = (index + 1) % count == 0;
    {
      std::optional<Model::NoSync> guard;
      if (!last) guard = model.no_sync();
      const auto outputs =
          model(inputs[index].narrow(0, rank * batch, batch), job.tensor("branches")[index].item<int64_t>());
      const auto target = targets[index].narrow(0, rank * batch, batch).flatten();
      const auto loss = torch::nn::functional::cross_entropy(outputs[0], target);
      loss.backward();
      losses.push_back(loss.item<double>());
    }
    if (!last) continue;
    if (max_norm > 0) norms.push_back(model.clip_grad_norm_(max_norm).item<double>());
    optimizer->step();
    optimizer->zero_grad();
  }
  Tensors result;
  for (const auto& [name, value] : model.full_state_dict()) result.insert(name, value.toTensor());
  result.insert("norms", torch::tensor(norms, at::kDouble));
  result.insert("losses", torch::tensor(losses, at::kDouble));
  results.insert(name + (gather ? ", gathered" : ""), result);
  if (nested && gather) results.insert(name + ", groups", nested->groups);
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3, "usage: fsdp_parity_driver JOBS OUTPUT");
  auto world = lockstep::init_process_group();
  c10::Dict<std::string, Tensors> results;
  for (const auto& entry : lockstep::testing::read_pickle(argv[1]).toGenericDict()) {
    for (const bool gather : {false, true}) {
      train(Dictionary(entry.value()), entry.key().toStringRef(), world.rank(), world.size(), gather,
            results);
    }
  }
  lockstep::testing::write_pickle(std::string(argv[2]) + "." + std::to_string(world.rank()), results);
} catch (const std::exception& error) {
  std::cerr << "fsdp_parity_driver: " << error.what() << std::endl;
  return 1;
}

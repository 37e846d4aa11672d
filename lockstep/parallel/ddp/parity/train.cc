#include <sstream>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/join.h>
#include <lockstep/parallel/ddp/parity/models.h>
#include <lockstep/parallel/ddp/parity/setup.h>
#include <lockstep/parallel/ddp/parity/train.h>

namespace parity {
namespace {

/// The same tensor may be there under two names.
Tensors state_of(const Net& net) {
  Tensors state;
  for (const auto& item : net.named_parameters()) state.insert(item.key(), item.value().detach());
  for (const auto& item : net.named_buffers()) state.insert(item.key(), item.value());
  return state;
}

std::shared_ptr<Net> prepared_net(const Dictionary& job, int rank) {
  auto net = make_net(job.text("model"));
  const auto dtype = dtype_of(job.text("dtype"));
  const auto weights = job.dictionary("weights");
  torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.set_data(parameter.to(dtype));
  for (auto& buffer : net->buffers()) {  // not net->to(dtype), which makes numbers of masks, too
    if (buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
  }
  for (const auto& item : state_of(*net)) {
    at::Tensor tensor = item.value();
    tensor.copy_(weights.tensor(item.key()));
    if (job.flag("perturb") && rank > 0)
      tensor.add_(tensor.is_floating_point() ? at::Scalar(rank * 0.01) : rank);
  }
  return net;
}

torch::Tensor loss_of(const Dictionary& job, Model& model, torch::Tensor x, const torch::Tensor& y,
                      int64_t branch) {
  const bool penalty = job.flag("gradient_penalty");
  if (penalty) x = x.clone().requires_grad_();
  const auto outputs = model(x, branch);
  const auto logits = outputs[0].to(dtype_of(job.text("dtype")));
  auto loss = torch::nn::functional::cross_entropy(logits, y.flatten());
  if (branch & 4) loss = loss + 0.1 * outputs[1].square().mean();
  if (penalty) {
    const auto gradient = torch::autograd::grad({logits.sum()}, {x}, /*grad_outputs=*/{},
                                                /*retain_graph=*/true, /*create_graph=*/true)[0];
    loss = loss + 0.01 * gradient.square().sum(1).mean();
  }
  return loss;
}

/// One iteration: backward for each of its batches, all but the last without synchronisation. The last loss.
torch::Tensor backward(const Dictionary& job, Model& model, int64_t step, int rank, int world_size) {
  const auto inputs = job.tensor("inputs");
  const auto targets = job.tensor("targets");
  const int64_t batch = inputs.size(1) / world_size;
  const int64_t count = job.integer("accumulate");
  torch::Tensor loss;
  for (int64_t index = step * count; index < (step + 1) * count; ++index) {
    std::optional<Model::NoSync> guard;
    if (index + 1 < (step + 1) * count) guard = model.no_sync();
    loss = loss_of(job, model, inputs[index].narrow(0, rank * batch, batch),
                   targets[index].narrow(0, rank * batch, batch),
                   job.tensor("branches")[index][rank].item<int64_t>());
    (loss / static_cast<double>(count)).backward();
  }
  return loss.detach();
}

/// What the periodic model averager does after the post-local hook's steps.
void average_parameters(const Dictionary& options, const Net& net, int64_t step) {
  const int64_t local_steps = step - options.integer("start_localSGD_iter");
  if (local_steps < 0 || local_steps % options.integer("period") != 0) return;
  torch::NoGradGuard no_grad;
  for (const auto& parameter : distinct_parameters(net)) {
    at::Tensor average = parameter.detach();
    lockstep::all_reduce(average, lockstep::ReduceOp::AVG);
  }
}

torch::Tensor bucket_sizes(const Model& model) {
  const auto texts = model.get_ddp_logging_data().strs_map;
  const auto rebuilt = texts.find("rebuilt_bucket_sizes");
  std::istringstream sizes(rebuilt != texts.end() ? rebuilt->second : texts.at("bucket_sizes"));
  std::vector<int64_t> bytes;
  for (std::string size; std::getline(sizes, size, ',');) bytes.push_back(std::stoll(size));
  return torch::tensor(bytes);
}

}  // namespace

Tensors train(const Dictionary& job, int rank, int world_size, const lockstep::ProcessGroup& pairs) {
  const auto net = prepared_net(job, rank);
  Model model(net, ddp_options(job, *net, pairs));
  register_hooks(model, job, pairs);
  const auto optimizer = make_optimizer(job, distinct_parameters(*net));
  const std::string joins = job.text("join");
  std::vector<double> losses;
  {
    auto join = model.join({.enable = !joins.empty(), .divide_by_initial_world_size = joins != "effective"});
    const auto steps = job.tensor("steps")[rank].item<int64_t>();
    for (int64_t step = 0; step < steps; ++step) {
      losses.push_back(backward(job, model, step, rank, world_size).item<double>());
      if (!job.flag("in_backward")) optimizer->step();
      if (job.text("hook") == "post_local_sgd")
        average_parameters(job.dictionary("hook_options"), *net, step);
      optimizer->zero_grad(job.flag("set_to_none"));
    }
  }
  Tensors result;
  for (const auto& item : state_of(*net)) result.insert(item.key(), item.value().clone());
  result.insert("losses", torch::tensor(losses, torch::kDouble));
  if (job.flag("buckets")) result.insert("buckets", bucket_sizes(model));
  return result;
}

}  // namespace parity

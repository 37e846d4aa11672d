#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/parallel/data_parallel/internal/replica_graphs.h>

namespace lockstep::data_parallel::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// All that the node needs in backward.
struct Graphs : torch::CustomClassHolder {
  std::vector<ReplicaGraph> replicas;
  std::vector<at::Device> input_devices;
  ReplicaPlaces places;
  /// Another node computes parts of the same graphs, the one that their differentiable backward made. Then no
  /// backward frees what they saved, because the other one may come later; it goes with the last of the
  /// nodes.
  bool is_shared = false;
};

/// What the backward of one replica is asked for.
struct Request {
  variable_list outputs;
  variable_list gradients;      // of the outputs
  variable_list leaves;         // whose gradients are wanted
  std::vector<size_t> sources;  // the inputs that they stand for
};

/// Computes all replicas' requests; the answers lie like the requests' leaves, undefined where a leaf has no
/// part in the outputs.
std::vector<variable_list> compute(const std::vector<Request>& requests, const ReplicaPlaces& places,
                                   bool keep_graph, bool create_graph) {
  std::vector<variable_list> answers(requests.size());
  const auto grad = [&](const Request& request) {
    return torch::autograd::grad(request.outputs, request.leaves, request.gradients, keep_graph, create_graph,
                                 /*allow_unused=*/true);
  };
  const auto is_empty = [](const Request& request) {
    return request.outputs.empty() || request.leaves.empty();
  };
  if (places.devices.front().is_cpu()) {
    // Autograd computes a CPU graph in the thread that asks.
    places.threads->run(
        static_cast<int>(requests.size()),
        [&](int i) {
          const auto& request = requests[static_cast<size_t>(i)];
          if (!is_empty(request)) answers[static_cast<size_t>(i)] = grad(request);
        },
        [&](int i) { return "in the backward " + places.name(i); });
  } else {
    // Autograd has a thread for each device, and this may be one of them: if it waited for other threads,
    // those could wait for it. So all graphs are computed by one call.
    Request all;
    for (const auto& request : requests) {
      if (is_empty(request)) continue;
      all.outputs.insert(all.outputs.end(), request.outputs.begin(), request.outputs.end());
      all.gradients.insert(all.gradients.end(), request.gradients.begin(), request.gradients.end());
      all.leaves.insert(all.leaves.end(), request.leaves.begin(), request.leaves.end());
    }
    if (is_empty(all)) return answers;
    const auto found = grad(all);
    auto next = found.begin();
    for (size_t i = 0; i < requests.size(); ++i) {
      if (is_empty(requests[i])) continue;
      const auto end = next + static_cast<std::ptrdiff_t>(requests[i].leaves.size());
      answers[i].assign(next, end);
      next = end;
    }
  }
  return answers;
}

std::vector<variable_list> join(std::vector<ReplicaGraph> replicas, const variable_list& inputs,
                                const ReplicaPlaces& places, bool is_shared);

/// The answers as functions of the inputs and of the incoming gradients: the graphs that their computation
/// builds are joined in turn.
std::vector<variable_list> compute_differentiably(std::vector<Request> requests, Graphs& graphs,
                                                  variable_list inputs) {
  std::vector<ReplicaGraph> higher(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    higher[i] = {.leaves = graphs.replicas[i].leaves, .sources = graphs.replicas[i].sources, .outputs = {}};
    for (auto& gradient : requests[i].gradients) {
      if (!gradient.requires_grad()) continue;
      higher[i].leaves.push_back(gradient.detach().requires_grad_());
      higher[i].sources.push_back(inputs.size());
      inputs.push_back(std::exchange(gradient, higher[i].leaves.back()));
    }
  }
  graphs.is_shared = true;
  auto answers = compute(requests, graphs.places, /*keep_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0; i < answers.size(); ++i) {
    for (const auto& answer : answers[i]) {
      if (answer.defined()) higher[i].outputs.push_back(answer);
    }
  }
  const auto joined = join(std::move(higher), inputs, graphs.places, /*is_shared=*/true);
  for (size_t i = 0; i < answers.size(); ++i) {
    auto next = joined[i].begin();
    for (auto& answer : answers[i]) {
      if (answer.defined()) answer = *next++;
    }
  }
  return answers;
}

struct JoinGraphs : torch::autograd::Function<JoinGraphs> {
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Graphs>& graphs,
                               at::TensorList inputs) {
    context->saved_data["graphs"] = c10::IValue::make_capsule(graphs);
    context->save_for_backward(inputs.vec());  // for gradients of gradients alone
    context->set_materialize_grads(false);
    variable_list outputs;
    variable_list constants;
    for (const auto& replica : graphs->replicas) {
      for (const auto& output : replica.outputs) {
        outputs.push_back(output.variable_data());
        if (!output.requires_grad()) constants.push_back(outputs.back());
      }
    }
    context->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["graphs"].toCapsule();
    auto& graphs = static_cast<Graphs&>(*capsule);
    std::vector<Request> requests(graphs.replicas.size());
    auto gradient = gradients.begin();
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto& replica = graphs.replicas[i];
      for (const auto& output : replica.outputs) {
        if (output.requires_grad() && gradient->defined()) {
          requests[i].outputs.push_back(output);
          requests[i].gradients.push_back(*gradient);
        }
        ++gradient;
      }
      for (size_t leaf = 0; leaf < replica.leaves.size(); ++leaf) {
        if (!context->needs_input_grad(replica.sources[leaf])) continue;
        requests[i].leaves.push_back(replica.leaves[leaf]);
        requests[i].sources.push_back(replica.sources[leaf]);
      }
    }

    const bool create_graph = c10::GradMode::is_enabled();
    const auto answers =
        create_graph ? compute_differentiably(requests, graphs, context->get_saved_variables())
                     : compute(requests, graphs.places,
                               graphs.is_shared || torch::autograd::get_current_graph_task_keep_graph(),
                               /*create_graph=*/false);
    variable_list sums(graphs.input_devices.size());
    std::vector<bool> is_new(sums.size());  // the sum is a tensor of ours, which may be added to in place
    for (size_t i = 0; i < requests.size(); ++i) {
      for (size_t leaf = 0; leaf < answers[i].size(); ++leaf) {
        if (!answers[i][leaf].defined()) continue;
        const size_t source = requests[i].sources[leaf];
        auto& sum = sums[source];
        const auto part = answers[i][leaf].to(graphs.input_devices[source]);
        if (!sum.defined()) {
          sum = part;
        } else if (is_new[source]) {
          sum.add_(part);
        } else {
          sum = at::add(sum, part);
          is_new[source] = !create_graph && sum.layout() == at::kStrided;
        }
      }
    }
    sums.insert(sums.begin(), at::Tensor());  // for the argument `graphs`
    return sums;
  }
};

std::vector<variable_list> join(std::vector<ReplicaGraph> replicas, const variable_list& inputs,
                                const ReplicaPlaces& places, bool is_shared) {
  bool any = false;
  std::vector<variable_list> answer;
  for (const auto& replica : replicas) {
    answer.push_back(replica.outputs);
    for (const auto& output : replica.outputs) any |= output.requires_grad();
  }
  if (!any) return answer;

  auto graphs = c10::make_intrusive<Graphs>();
  graphs->replicas = std::move(replicas);
  graphs->places = places;
  graphs->is_shared = is_shared;
  for (const auto& input : inputs) graphs->input_devices.push_back(input.device());
  const auto outputs = JoinGraphs::apply(graphs, at::TensorList(inputs));
  auto next = outputs.begin();
  for (auto& of_replica : answer) {
    for (auto& output : of_replica) output = *next++;
  }
  return answer;
}

}  // namespace

std::string ReplicaPlaces::name(int replica) const {
  return "in replica " + std::to_string(replica) + " on device " +
         devices[static_cast<size_t>(replica)].str();
}

std::vector<variable_list> join_graphs(std::vector<ReplicaGraph> replicas, const variable_list& inputs,
                                       const ReplicaPlaces& places) {
  return join(std::move(replicas), inputs, places, /*is_shared=*/false);
}

}  // namespace lockstep::data_parallel::internal

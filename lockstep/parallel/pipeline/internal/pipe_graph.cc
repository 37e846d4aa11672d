#include <cstddef>
#include <utility>

#include <ATen/ops/add.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/device/streams.h>
#include <lockstep/parallel/pipeline/internal/pipe_graph.h>

namespace lockstep::pipeline::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

/// One run of the cells' backwards. Parameters' gradients add up as autograd adds them up in one graph of all
/// micro-batches: from the last micro-batch to the first, from the last layer to the first.
class PipeBackward {
 public:
  PipeBackward(PipeGraph& graph, bool keep_graph, std::vector<bool> wanted)
      : graph_(graph),
        keep_graph_(keep_graph),
        wanted_(std::move(wanted)),
        sums_(graph.parameters.size()),
        input_gradients_(graph.micro_batches),
        parts_(graph.micro_batches, std::vector<variable_list>(graph.places.size())) {
    for (const auto& of_micro_batch : graph.cells) {
      first_input_.push_back(input_count_);
      for (const auto& edge : of_micro_batch[0].inputs) input_count_ += edge.is_valid() ? 1 : 0;
    }
  }

  /// `gradients`: of the last partition's outputs, by micro-batch; may be undefined. Returns those of the
  /// node's inputs.
  variable_list run(std::vector<variable_list> gradients) {
    const size_t micro_batches = graph_.micro_batches, partitions = graph_.places.size();
    PipeMailboxes<variable_list> boxes(micro_batches, partitions);
    for (size_t m = 0; m < micro_batches; ++m) boxes.put({m, partitions - 1}, std::move(gradients[m]));
    const auto where = [&](PipeCellId cell) {
      return "in the backward of " + name_of(cell, graph_.places, micro_batches);
    };
    if (graph_.places[0].device.is_cpu()) {
      // Autograd computes a CPU graph in the thread that asks.
      graph_.threads->run(
          static_cast<int>(partitions),
          [&](int p) {
            for (size_t m = micro_batches; m-- > 0;) compute({m, static_cast<size_t>(p)}, boxes);
          },
          [](int) { return std::string(); });
    } else {
      // Autograd has a thread for each device, and this may be one of them: if it waited for other threads,
      // those could wait for it. It only enqueues, in the order in which the devices can begin.
      for (size_t step = 0; step < micro_batches + partitions - 1; ++step) {
        for (size_t p = partitions; p-- > 0;) {
          const size_t done =
              step + p + 1 - partitions;  // wraps round where the partition's turn has not come
          if (done < micro_batches) compute({micro_batches - 1 - done, p}, boxes);
        }
      }
    }
    boxes.throw_failure(where);
    return answer();
  }

 private:
  void compute(PipeCellId cell, PipeMailboxes<variable_list>& boxes) {
    const auto gradients = boxes.take(cell);
    if (!gradients) return;
    try {
      auto found = gradients_of_inputs(cell, *gradients);
      if (cell.partition == 0) {
        input_gradients_[cell.micro_batch] = std::move(found);
        return;
      }
      const size_t before = cell.partition - 1;
      for (auto& gradient : found) gradient = moved_to(gradient, graph_.places[before].device);
      boxes.put({cell.micro_batch, before}, std::move(found));
    } catch (...) {
      boxes.fail(cell);
    }
  }

  /// Also adds to the sums of the parameters.
  variable_list gradients_of_inputs(PipeCellId id, const variable_list& gradients) {
    const PipeCell& cell = graph_.cells[id.micro_batch][id.partition];
    edge_list roots, wanted;
    variable_list root_gradients;
    std::vector<at::Tensor*> places;  // of what is wanted
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined() || !cell.outputs[i].is_valid()) continue;
      roots.push_back(cell.outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    variable_list answer(cell.inputs.size());
    if (roots.empty()) return answer;
    size_t input = first_input_[id.micro_batch];
    for (size_t i = 0; i < answer.size(); ++i) {
      if (!cell.inputs[i].is_valid()) continue;
      if (id.partition == 0 && !wanted_[input++]) continue;
      wanted.push_back(cell.inputs[i]);
      places.push_back(&answer[i]);
    }
    const auto& parameters = graph_.parameters_of_partition[id.partition];
    auto& parts = parts_[id.micro_batch][id.partition];
    parts.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const size_t parameter = parameters[i];
      if (!wanted_[input_count_ + parameter]) continue;
      at::Tensor& sum = graph_.is_shared[parameter] ? parts[i] : sums_[parameter];
      wanted.push_back(graph_.parameters[parameter]);
      places.push_back(&sum);
      if (!sum.defined()) continue;
      // The sum so far comes first, and autograd adds to it use by use.
      roots.push_back(graph_.parameters[parameter]);
      root_gradients.push_back(sum);
    }
    if (wanted.empty()) return answer;
    auto found = torch::autograd::Engine::get_default_engine().execute(
        roots, root_gradients, keep_graph_, /*create_graph=*/false, /*accumulate_grad=*/false, wanted);
    for (size_t i = 0; i < places.size(); ++i) *places[i] = std::move(found[i]);
    return answer;
  }

  variable_list answer() {
    for (size_t m = graph_.micro_batches; m-- > 0;) {
      for (size_t p = graph_.places.size(); p-- > 0;) {
        const auto& parameters = graph_.parameters_of_partition[p];
        for (size_t i = 0; i < parts_[m][p].size(); ++i) {
          const auto& part = parts_[m][p][i];
          auto& sum = sums_[parameters[i]];
          if (part.defined()) sum = sum.defined() ? at::add(sum, part) : part;
        }
      }
    }
    variable_list answer;
    for (size_t m = 0; m < graph_.micro_batches; ++m) {
      const auto& edges = graph_.cells[m][0].inputs;
      for (size_t i = 0; i < edges.size(); ++i) {
        if (edges[i].is_valid()) answer.push_back(std::move(input_gradients_[m][i]));
      }
    }
    answer.insert(answer.end(), sums_.begin(), sums_.end());
    return answer;
  }

  PipeGraph& graph_;
  const bool keep_graph_;
  const std::vector<bool> wanted_;   // by the node's inputs: tensors of the micro-batches, parameters
  std::vector<size_t> first_input_;  // of each micro-batch
  size_t input_count_ = 0;
  variable_list sums_;  // of each parameter; a partition's thread touches its own alone
  std::vector<variable_list> input_gradients_;
  std::vector<std::vector<variable_list>>
      parts_;  // gradients of shared parameters, like parameters_of_partition
};

struct JoinCells : torch::autograd::Function<JoinCells> {
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<PipeGraph>& graph,
                               at::TensorList /*inputs*/) {
    context->saved_data["graph"] = c10::IValue::make_capsule(graph);
    context->set_materialize_grads(false);
    variable_list outputs, constants;
    for (const auto& output : std::exchange(graph->node_outputs, {})) {
      outputs.push_back(output.variable_data());
      if (!output.requires_grad()) constants.push_back(outputs.back());
    }
    context->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK(
        !c10::GradMode::is_enabled(),
        "Pipe does not compute gradients of gradients (create_graph): use the module without it for them");
    const auto capsule = context->saved_data["graph"].toCapsule();
    auto& graph = static_cast<PipeGraph&>(*capsule);
    TORCH_CHECK(!graph.cells.empty(),
                "Trying to backward through the graph of a Pipe a second time, but what it saved is freed "
                "already. Give "
                "backward() retain_graph = true the first time");
    for (const auto& parameter : graph.parameters) {
      TORCH_CHECK(
          parameter.function->tensor_pre_hooks().empty(),
          "Pipe: a parameter has a hook of register_hook(), which would be called for the gradient of each "
          "micro-batch, and once more for their sum: change the gradient after backward() instead");
    }
    std::vector<variable_list> by_micro_batch;
    auto next = gradients.begin();
    size_t inputs = graph.parameters.size();
    for (const auto& cells : graph.cells) {
      const auto end = next + static_cast<std::ptrdiff_t>(cells.back().outputs.size());
      by_micro_batch.emplace_back(next, end);
      next = end;
      for (const auto& edge : cells.front().inputs) inputs += edge.is_valid() ? 1 : 0;
    }
    std::vector<bool> wanted;
    for (size_t i = 0; i < inputs; ++i) wanted.push_back(context->needs_input_grad(i));
    const bool keep_graph = torch::autograd::get_current_graph_task_keep_graph();
    auto answer = PipeBackward(graph, keep_graph, std::move(wanted)).run(std::move(by_micro_batch));
    if (!keep_graph) graph.cells.clear();
    answer.insert(answer.begin(), at::Tensor());  // for the argument `graph`
    return answer;
  }
};

}  // namespace

at::Tensor cut(const at::Tensor& tensor, Edge& edge) {
  if (!tensor.requires_grad()) return tensor;
  at::Tensor leaf;  // of the tensor's form, without its memory
  {
    const c10::AutoGradMode no_grad(false);
    leaf = at::empty({}, tensor.options()).expand(tensor.sizes()).requires_grad_();
  }
  edge = torch::autograd::impl::gradient_edge(at::alias(leaf));
  at::Tensor start = tensor.detach();
  torch::autograd::impl::set_gradient_edge(start, edge);
  return start;
}

Edge edge_of(const at::Tensor& tensor) {
  return tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : Edge();
}

std::string name_of(PipeCellId cell, const std::vector<PipePlace>& places, size_t micro_batches) {
  return places[cell.partition].name + ", micro-batch " + std::to_string(cell.micro_batch) + " of " +
         std::to_string(micro_batches);
}

std::vector<variable_list> join_cells(const c10::intrusive_ptr<PipeGraph>& graph,
                                      std::vector<variable_list> outputs) {
  bool any = false;
  for (size_t m = 0; m < outputs.size(); ++m) {
    for (const auto& output : outputs[m]) {
      graph->cells[m].back().outputs.push_back(edge_of(output));
      graph->node_outputs.push_back(output);
      any |= output.requires_grad();
    }
  }
  if (!any) return outputs;
  const auto inputs = std::exchange(graph->node_inputs, {});
  const auto joined = JoinCells::apply(graph, at::TensorList(inputs));
  auto next = joined.begin();
  for (auto& of_micro_batch : outputs) {
    for (auto& output : of_micro_batch) output = *next++;
  }
  return outputs;
}

}  // namespace lockstep::pipeline::internal

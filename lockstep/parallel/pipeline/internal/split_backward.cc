#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/parallel/pipeline/internal/split_backward.h>

namespace lockstep::pipeline::internal {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(Edge::function);

/// Notes what comes to a node.
class CaptureGradients : public torch::autograd::FunctionPreHook {
 public:
  explicit CaptureGradients(variable_list& captured) : captured_(captured) {}
  variable_list operator()(const variable_list& gradients) override {
    captured_ = gradients;
    return gradients;
  }

 private:
  variable_list& captured_;
};

/// Gives a node what came to it in the first half, whatever has flown to it from the group's other nodes.
class GiveGradients : public torch::autograd::FunctionPreHook {
 public:
  explicit GiveGradients(variable_list given) : given_(std::move(given)) {}
  variable_list operator()(const variable_list& /*gradients*/) override { return given_; }

 private:
  variable_list given_;
};

/// All nodes under the roots, children before parents.
std::vector<NodePtr> nodes_under(const edge_list& roots) {
  std::vector<NodePtr> nodes;
  std::unordered_set<const Node*> seen;
  std::vector<std::pair<NodePtr, size_t>> open;  // and the next child to look at
  for (const Edge& root : roots) {
    if (seen.insert(root.function.get()).second) open.emplace_back(root.function, 0);
    while (!open.empty()) {
      Node& node = *open.back().first;
      if (open.back().second == node.num_outputs()) {
        nodes.push_back(std::move(open.back().first));
        open.pop_back();
        continue;
      }
      const NodePtr child = node.next_edge(open.back().second++).function;
      if (child && seen.insert(child.get()).second) open.emplace_back(child, 0);
    }
  }
  return nodes;
}

/// Which of some numbers belong together.
class Unions {
 public:
  explicit Unions(size_t count) : parents_(count) { std::iota(parents_.begin(), parents_.end(), size_t{0}); }
  size_t find(size_t number) {
    while (parents_[number] != number) number = parents_[number] = parents_[parents_[number]];
    return number;
  }
  void join(const std::set<size_t>& numbers) {
    for (const size_t number : numbers) parents_[find(number)] = find(*numbers.begin());
  }

 private:
  std::vector<size_t> parents_;
};

using Marks = std::unordered_set<const Node*>;

bool any_child_in(Node& node, const Marks& marks) {
  const auto& edges = node.next_edges();
  return std::any_of(edges.begin(), edges.end(),
                     [&](const Edge& edge) { return edge.function && marks.count(edge.function.get()) > 0; });
}

/// The second half runs through what lies between the nodes of a group.
void mark_between(const std::vector<NodePtr>& group, const std::vector<NodePtr>& all, Marks& kept) {
  if (group.size() < 2) return;
  Marks members, leading, reached;
  for (const NodePtr& node : group) members.insert(node.get());
  for (const NodePtr& node : all) {
    if (any_child_in(*node, members) || any_child_in(*node, leading)) leading.insert(node.get());
  }
  for (auto node = all.rbegin(); node != all.rend(); ++node) {
    if (members.count(node->get()) == 0 && reached.count(node->get()) == 0) continue;
    if (leading.count(node->get()) > 0) kept.insert(node->get());
    for (const Edge& edge : (*node)->next_edges()) {
      if (edge.function) reached.insert(edge.function.get());
    }
  }
}

}  // namespace

InputBackward backward_inputs(const edge_list& roots, const variable_list& gradients,
                              const std::vector<at::Tensor>& inputs) {
  edge_list input_edges;
  Marks to_input;  // nodes that lead to an input
  for (const at::Tensor& input : inputs) {
    input_edges.push_back(torch::autograd::impl::gradient_edge(input));
    to_input.insert(input_edges.back().function.get());
  }
  const Marks input_nodes = to_input;

  const std::vector<NodePtr> nodes = nodes_under(roots);
  std::vector<NodePtr> weights;
  // The weights to which a node leads that leads to no input.
  std::unordered_map<const Node*, std::set<size_t>> weights_under;
  std::vector<std::pair<NodePtr, std::set<size_t>>> meeting;  // lead to an input, and beside it to weights
  for (const NodePtr& node : nodes) {
    const bool leads = to_input.count(node.get()) > 0 || any_child_in(*node, to_input);
    std::set<size_t> under;
    for (const Edge& edge : node->next_edges()) {
      const auto child = edge.function ? weights_under.find(edge.function.get()) : weights_under.end();
      if (child != weights_under.end()) under.insert(child->second.begin(), child->second.end());
    }
    if (!leads) {
      if (dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get()) != nullptr) {
        under.insert(weights.size());
        weights.push_back(node);
      }
      weights_under.emplace(node.get(), std::move(under));
      continue;
    }
    to_input.insert(node.get());
    if (!under.empty()) meeting.emplace_back(node, std::move(under));
  }

  Unions unions(weights.size());
  for (const auto& [node, under] : meeting) unions.join(under);
  for (const Edge& root : roots) {
    const auto under = weights_under.find(root.function.get());
    if (under != weights_under.end()) unions.join(under->second);
  }
  // Groups of several nodes become one, for the second half runs through what lies between them, and frees it.
  std::unordered_map<size_t, size_t> nodes_of;  // how many, by the number that stands for the weights
  for (const auto& [node, under] : meeting) ++nodes_of[unions.find(*under.begin())];
  std::set<size_t> in_groups_of_several;
  for (const auto& [weight, count] : nodes_of) {
    if (count > 1) in_groups_of_several.insert(weight);
  }
  unions.join(in_groups_of_several);

  InputBackward result;
  auto& groups = result.weights.groups_;
  std::unordered_map<size_t, size_t> group_of;  // by the number that stands for its weights
  const auto group = [&](size_t weight) -> WeightBackward::Group& {
    const auto [place, is_new] = group_of.emplace(unions.find(weight), groups.size());
    if (is_new) groups.emplace_back();
    return groups[place->second];
  };
  for (const auto& [node, under] : meeting) group(*under.begin()).nodes.push_back(node);
  edge_list roots_to_input;
  variable_list gradients_to_input;
  for (size_t i = 0; i < roots.size(); ++i) {
    const auto under = weights_under.find(roots[i].function.get());
    if (under == weights_under.end()) {
      roots_to_input.push_back(roots[i]);
      gradients_to_input.push_back(gradients[i]);
    } else if (!under->second.empty()) {
      auto& own = group(*under->second.begin());
      own.roots.push_back(roots[i]);
      own.root_gradients.push_back(gradients[i]);
    }
  }
  for (size_t weight = 0; weight < weights.size(); ++weight) {
    if (group_of.count(unions.find(weight)) > 0) group(weight).weights.emplace_back(weights[weight], 0);
  }
  for (auto& each : groups) each.gradients.resize(each.nodes.size());
  std::stable_partition(groups.begin(), groups.end(),
                        [](const WeightBackward::Group& each) { return each.nodes.size() <= 1; });

  result.gradients.resize(inputs.size());
  if (!roots_to_input.empty() && !inputs.empty()) {
    std::vector<Node*> hooked;
    const auto unhook = c10::make_scope_exit([&] {
      for (Node* node : hooked) node->pre_hooks().pop_back();
    });
    for (auto& each : groups) {
      for (size_t i = 0; i < each.nodes.size(); ++i) {
        each.nodes[i]->add_pre_hook(std::make_unique<CaptureGradients>(each.gradients[i]));
        hooked.push_back(each.nodes[i].get());
      }
    }
    result.gradients = Engine::get_default_engine().execute(roots_to_input, gradients_to_input,
                                                            /*keep_graph=*/true, /*create_graph=*/false,
                                                            /*accumulate_grad=*/false, input_edges);
  }

  Marks kept;
  for (const auto& each : groups) {
    for (const NodePtr& node : each.nodes) kept.insert(node.get());
    mark_between(each.nodes, nodes, kept);
  }
  for (const NodePtr& node : nodes) {
    const bool is_done = to_input.count(node.get()) > 0 && input_nodes.count(node.get()) == 0;
    if (is_done && kept.count(node.get()) == 0) node->release_variables();
  }
  return result;
}

void WeightBackward::run() {
  // The last one runs through the others' nodes, if it has several of its own.
  const bool last_is_of_several = !groups_.empty() && groups_.back().nodes.size() > 1;
  for (Group& group : groups_) {
    const bool keep_graph = last_is_of_several && &group != &groups_.back();
    edge_list roots = std::move(group.roots);
    variable_list gradients = std::move(group.root_gradients);
    for (size_t i = 0; i < group.nodes.size(); ++i) {
      bool any = false;
      for (uint32_t j = 0; j < group.gradients[i].size(); ++j) {
        if (!group.gradients[i][j].defined()) continue;
        roots.emplace_back(group.nodes[i], j);
        gradients.push_back(group.gradients[i][j]);
        any = true;
      }
      if (any) group.nodes[i]->add_pre_hook(std::make_unique<GiveGradients>(std::move(group.gradients[i])));
    }
    if (!roots.empty()) {
      Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false,
                                           /*accumulate_grad=*/true, group.weights);
    }
    group = {};
  }
  groups_.clear();
}

}  // namespace lockstep::pipeline::internal

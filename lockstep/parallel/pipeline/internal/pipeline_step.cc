#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor_split.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/nn/activation_checkpoint_count.h>
#include <lockstep/parallel/pipeline/internal/pipeline_step.h>
#include <lockstep/parallel/pipeline/pipeline_random.h>

namespace lockstep::pipeline::internal {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::impl::gradient_edge;

/// A rank asks for what other hosts send so many actions ahead, so that it crosses the wire while the rank computes. Other
/// ranks do not compute more by that: the schedule alone bounds it. The rank holds what has come until it takes it.
constexpr size_t kAhead = 6;
/// Without backward, a rank computes so many micro-batches before the next stage takes the first of them, and asks for so many.
constexpr int64_t kForwardsAhead = 2;

bool requires_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

/// Autograd may give an input and a weight gradients in one memory (of x.view(…) + w.view(…), say), and adds to the weight's in
/// place while the message with the input's is on its way.
at::Tensor in_own_memory(const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  const bool is_shared =
      gradient.use_count() > 1 || (gradient.has_storage() && gradient.storage().use_count() > 1);
  return is_shared ? gradient.clone() : gradient;
}

}  // namespace

PipelineStep::PipelineStep(PipelineCore& core, bool has_backward, bool return_outputs, const Tensors& inputs,
                           const at::Tensor& target)
    : core_(core),
      has_backward_(has_backward),
      return_outputs_(return_outputs),
      round_(micro_batches_of_a_round()) {
  const int64_t parts = core_.options.n_microbatches;
  if (core_.is_here(0)) {
    TORCH_CHECK_VALUE(!inputs.empty(), "the rank of stage 0 needs the batch's inputs");
    inputs_.resize(static_cast<size_t>(parts));
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensors cuts = cut(inputs[i], "input " + std::to_string(i), 0);
      TORCH_CHECK_VALUE(inputs[i].size(0) == inputs[0].size(0), "input ", i, " has ", inputs[i].size(0),
                        " rows, and input 0 has ", inputs[0].size(0), "; they are cut together");
      for (size_t part = 0; part < cuts.size(); ++part) inputs_[part].push_back(cuts[part]);
    }
  }
  if (core_.is_here(core_.num_stages - 1)) {
    TORCH_CHECK_VALUE(target.defined() || !has_backward,
                      "the rank of the last stage needs the batch's target");
    if (target.defined() && core_.options.loss_fn) {
      targets_ = cut(target, "the target", core_.num_stages - 1);
      losses_.resize(static_cast<size_t>(parts));
    }
    outputs_.resize(static_cast<size_t>(parts));
  }
  core_.memory = {};
  for (const PipelineStage& stage : core_.stages) backwards_left_[stage.stage_index()] = parts;
}

Tensors PipelineStep::cut(const at::Tensor& given, const std::string& name, int64_t stage) {
  const int64_t parts = core_.options.n_microbatches;
  TORCH_CHECK_VALUE(given.defined() && given.dim() > 0, name, " must have rows, along dimension 0");
  TORCH_CHECK_VALUE(given.size(0) >= parts, name, " has ", given.size(0), " rows, which can't make ", parts,
                    " micro-batches; give more rows, or make a pipeline of fewer micro-batches");
  Tensors cuts = at::tensor_split(given.detach(), parts, 0);
  if (!has_backward_ || !given.requires_grad()) return cuts;
  for (at::Tensor& part : cuts) part = part.detach().requires_grad_();
  given_.push_back({stage, given, cuts});
  return cuts;
}

void PipelineStep::run() {
  mark_step(StepMark::kForward, &core_);
  std::optional<TiedGradients> tied;
  if (has_backward_) {
    tied.emplace(core_);
    // A scaler begins with the first value that it scales, on ranks without a loss, too.
    if (core_.options.scale_loss) {
      core_.options.scale_loss(at::full({}, 1.0, at::TensorOptions(core_.stages.front().device())));
    }
  }
  for (size_t next = 0; next < core_.actions.size(); ++next) {
    const PipelineAction& action = core_.actions[next];
    const bool is_forward = action.type == ComputationType::kForward;
    if (!has_backward_ && !is_forward) continue;
    action_ = action;
    const std::string name = "PP:" + to_string(action);  // torch's, in traces
    RECORD_USER_SCOPE(name.c_str());
    const TellingAction telling(static_cast<uint32_t>(action.stage), to_string(action.type).front(),
                                static_cast<uint32_t>(action.micro_batch));
    enter_phase(is_forward ? TrainingPhase::kForward : TrainingPhase::kBackward);
    ask_ahead(next);
    const CallSite site(name);
    run(action);
    core_.messages->collect_sends();
    int64_t bytes_in_flight = core_.messages->bytes_in_flight();
    for (const auto& [tag, asked] : asked_) bytes_in_flight += asked.receipt->bytes();
    core_.memory.bytes_in_flight = std::max(core_.memory.bytes_in_flight, bytes_in_flight);
  }
  action_.reset();
  core_.messages->finish_sends();
  for (GradientAverage& average : averages_) average.wait();
  if (tied) tied->sum();
  if (has_backward_) ++core_.steps;
  enter_phase(TrainingPhase::kOptimizer);
}

void PipelineStep::run(const PipelineAction& action) {
  std::optional<PipelineRandomScope> random;  // of backward, too, which computes checkpointed layers again
  if (core_.options.seed) random.emplace(*core_.options.seed, core_.steps, action.micro_batch);
  if (action.type == ComputationType::kForward) return forward(action);
  const auto place = kept_.find({action.stage, action.micro_batch});
  TORCH_INTERNAL_ASSERT(place != kept_.end());
  Kept& kept = place->second;
  switch (action.type) {
    case ComputationType::kBackwardInput:
      if (kept.is_whole) {
        backward(action, kept);
      } else {
        backward_of_inputs(action, kept);
      }
      return forget_inputs(kept);
    case ComputationType::kFullBackward:
      backward(action, kept);
      break;
    case ComputationType::kBackwardWeight:
      kept.weights.run();
      break;
    case ComputationType::kForward:
      break;
  }
  bytes_kept_ -= kept.bytes;
  kept_.erase(place);
  finish_weights(action);
}

// ---- forward

void PipelineStep::forward(const PipelineAction& action) {
  const PipelineStage& stage = core_.stage(action.stage);
  Kept kept;
  const c10::AutoGradMode grad_mode(has_backward_);
  if (stage.is_first()) {
    for (const at::Tensor& input : std::exchange(inputs_[static_cast<size_t>(action.micro_batch)], {})) {
      kept.inputs.push_back(input.to(stage.device()));
    }
  }
  for (const int64_t from : core_.sources[static_cast<size_t>(action.stage)]) {
    Tensors taken = take(from, action.stage, action.micro_batch);
    kept.inputs_from.push_back(taken.size());
    std::move(taken.begin(), taken.end(), std::back_inserter(kept.inputs));
  }
  for (const at::Tensor& input : kept.inputs) kept.bytes += static_cast<int64_t>(input.nbytes());

  if (core_.options.seed) seed_pipeline_layer(-1 - action.stage);  // no layer's number
  std::optional<Autocast> autocast;
  if (core_.options.autocast) autocast.emplace(stage.device().type(), *core_.options.autocast);
  const int64_t checkpoints = activation_checkpoint_count();
  const Tensors outputs = stage.forward(kept.inputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK_VALUE(outputs[i].defined(), "output ", i, " of stage ", action.stage, " is undefined");
  }
  if (stage.is_last()) {
    compute_loss(action, outputs, kept);
  } else {
    const auto& routes = core_.outputs_to[static_cast<size_t>(action.stage)];
    TORCH_CHECK_VALUE(routes.empty() || routes.size() == outputs.size(), "stage ", action.stage, " gave ",
                      outputs.size(), " outputs, and its outputs_to tells of ", routes.size());
    for (const at::Tensor& output : outputs) {
      kept.outputs.push_back(requires_gradient(output) ? gradient_edge(output) : torch::autograd::Edge());
    }
    for (const int64_t to : core_.consumers[static_cast<size_t>(action.stage)]) {
      Tensors sent;
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (core_.goes_to(action.stage, i, to)) sent.push_back(outputs[i]);
      }
      if (std::any_of(sent.begin(), sent.end(), requires_gradient)) kept.gradients_from.push_back(to);
      pass(action.stage, to, action.micro_batch, std::move(sent));
    }
  }
  // Split, a checkpoint, the loss function's among them, would be computed again for each layer with weights.
  kept.is_whole = activation_checkpoint_count() > checkpoints;
  core_.memory.bytes_of_inputs = std::max(core_.memory.bytes_of_inputs, bytes_kept_ + kept.bytes);
  if (!has_backward_) return;
  bytes_kept_ += kept.bytes;
  kept_.emplace(Place{action.stage, action.micro_batch}, std::move(kept));
  core_.memory.activations = std::max(core_.memory.activations, static_cast<int64_t>(kept_.size()));
}

void PipelineStep::compute_loss(const PipelineAction& action, const Tensors& outputs, Kept& kept) {
  const auto micro_batch = static_cast<size_t>(action.micro_batch);
  if (!targets_.empty()) {
    const at::Tensor target = std::exchange(targets_[micro_batch], {}).to(core_.stage(action.stage).device());
    const at::Tensor loss = core_.options.loss_fn(outputs, target);
    TORCH_CHECK_VALUE(
        loss.defined() && loss.numel() == 1, "the loss function must give one number, not ",
        loss.defined() ? c10::str("a tensor of sizes ", loss.sizes()) : std::string("an undefined tensor"));
    losses_[micro_batch] = loss.detach();
    if (has_backward_ && loss.requires_grad()) {
      kept.outputs.push_back(gradient_edge(loss));
      const double scale =
          core_.options.scale_grads ? 1.0 / static_cast<double>(core_.options.n_microbatches) : 1.0;
      const c10::NoGradGuard no_grad;
      kept.seed = at::full(loss.sizes(), scale, loss.options().requires_grad(false));
      if (core_.options.scale_loss) kept.seed = core_.options.scale_loss(kept.seed).to(loss.scalar_type());
    }
  }
  if (!return_outputs_) return;
  for (const at::Tensor& output : outputs) outputs_[micro_batch].push_back(output.detach());
}

// ---- backward

/// What backward begins with. Autograd adds what later stages give first; so does this.
std::pair<edge_list, Tensors> PipelineStep::roots_of(const PipelineAction& action, Kept& kept) {
  Tensors gradients(kept.outputs.size());
  if (core_.stage(action.stage).is_last()) {
    if (!gradients.empty()) gradients.front() = kept.seed;
  } else {
    const c10::NoGradGuard no_grad;
    for (auto from = kept.gradients_from.rbegin(); from != kept.gradients_from.rend(); ++from) {
      const Tensors taken = take(*from, action.stage, action.micro_batch);
      size_t next = 0;
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (!core_.goes_to(action.stage, i, *from)) continue;
        const at::Tensor& one = taken.at(next++);
        if (one.defined()) gradients[i] = gradients[i].defined() ? gradients[i] + one : one;
      }
    }
  }
  std::pair<edge_list, Tensors> roots;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !kept.outputs[i].is_valid()) continue;
    roots.first.push_back(std::move(kept.outputs[i]));
    roots.second.push_back(std::move(gradients[i]));
  }
  kept.outputs.clear();
  return roots;
}

void PipelineStep::backward(const PipelineAction& action, Kept& kept) {
  {
    const auto [roots, gradients] = roots_of(action, kept);
    if (!roots.empty()) {
      Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                           /*accumulate_grad=*/true);
    }
  }
  if (action.stage == 0) return;
  Tensors of_inputs;
  for (const at::Tensor& input : kept.inputs) {
    of_inputs.push_back(requires_gradient(input) ? in_own_memory(input.grad()) : at::Tensor());
  }
  send_gradients(action, kept, of_inputs);
}

void PipelineStep::backward_of_inputs(const PipelineAction& action, Kept& kept) {
  Tensors leaves;
  if (action.stage > 0) {
    std::copy_if(kept.inputs.begin(), kept.inputs.end(), std::back_inserter(leaves), requires_gradient);
  }
  Tensors of_leaves;
  {
    const auto [roots, gradients] = roots_of(action, kept);
    InputBackward half = backward_inputs(roots, gradients, leaves);
    kept.weights = std::move(half.weights);
    of_leaves = std::move(half.gradients);
  }
  if (action.stage > 0) {
    Tensors of_inputs;
    size_t next = 0;
    for (const at::Tensor& input : kept.inputs) {
      of_inputs.push_back(requires_gradient(input) ? in_own_memory(of_leaves[next++]) : at::Tensor());
    }
    send_gradients(action, kept, of_inputs);
  }
  kept.seed = at::Tensor();
}

/// Those that the graph has for the weights' gradients live on, and count until these are there.
void PipelineStep::forget_inputs(Kept& kept) {
  for (at::Tensor& input : kept.inputs) {
    const auto bytes = static_cast<int64_t>(input.nbytes());
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> left(input.getIntrusivePtr());
    input.reset();
    if (!left.expired()) continue;
    kept.bytes -= bytes;
    bytes_kept_ -= bytes;
  }
  kept.inputs.clear();
}

void PipelineStep::send_gradients(const PipelineAction& action, const Kept& kept, const Tensors& gradients) {
  const auto& sources = core_.sources[static_cast<size_t>(action.stage)];
  std::ptrdiff_t begin = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto end = begin + static_cast<std::ptrdiff_t>(kept.inputs_from[i]);
    if (std::any_of(kept.inputs.begin() + begin, kept.inputs.begin() + end, requires_gradient)) {
      pass(action.stage, sources[i], action.micro_batch,
           {gradients.begin() + begin, gradients.begin() + end});
    }
    begin = end;
  }
}

void PipelineStep::finish_weights(const PipelineAction& action) {
  if (--backwards_left_.at(action.stage) > 0) return;
  finish_given(action.stage);
  if (!core_.options.data_parallel_group) return;
  // To the gradient of what another stage of this rank has, too, that one's backwards may still add.
  const auto is_used = [&](const at::Tensor& parameter) {
    return std::any_of(core_.stages.begin(), core_.stages.end(), [&](const PipelineStage& other) {
      return backwards_left_.at(other.stage_index()) > 0 &&
             std::any_of(other.parameters().begin(), other.parameters().end(),
                         [&](const at::Tensor& its) { return its.is_same(parameter); });
    });
  };
  Tensors parameters = core_.stage(action.stage).parameters();
  std::erase_if(parameters, is_used);
  averages_.emplace_back(parameters, *core_.options.data_parallel_group);
}

void PipelineStep::finish_given(int64_t stage) {
  edge_list roots;
  Tensors gradients;
  for (Given& one : given_) {
    if (one.stage != stage) continue;
    Tensors of_parts;
    bool any = false;
    for (const at::Tensor& part : one.parts) {
      any = any || part.grad().defined();
      of_parts.push_back(part.grad().defined() ? part.grad() : at::zeros_like(part));
    }
    one.parts.clear();
    if (!any) continue;
    const c10::NoGradGuard no_grad;
    roots.push_back(gradient_edge(one.whole));
    gradients.push_back(at::cat(of_parts));
  }
  if (roots.empty()) return;
  Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

// ---- between stages

/// With several stages a rank computes so many micro-batches of one before those of the next.
int64_t PipelineStep::micro_batches_of_a_round() const {
  int64_t round = 0;
  for (const PipelineAction& action : core_.actions) {
    if (action.type != ComputationType::kForward) continue;
    if (action.stage != core_.rank) break;
    ++round;
  }
  return round;
}

/// Without backward nothing but this bounds how many activations wait for their receivers. No rank waits for itself so,
/// since what it waits for is of an earlier micro-batch, or an earlier round. A stage further down the pipeline takes a
/// micro-batch later by one for each stage between: a bound that did not count these would leave ranks of a long pipeline
/// idle. A round is at least as long as the way from one of a rank's stages to its next one, or has all micro-batches.
int64_t PipelineStep::most_ahead(int64_t from, int64_t to) const {
  return core_.stages.size() == 1 ? kForwardsAhead + (to - from - 1) : round_;
}

void PipelineStep::pass(int64_t from, int64_t to, int64_t micro_batch, Tensors tensors) {
  const int tag = core_.tag_of(from, to, micro_batch);
  if (!core_.is_here(to)) {
    if (const int64_t ahead = most_ahead(from, to); !has_backward_ && micro_batch >= ahead) {
      core_.messages->finish_sends(core_.tag_of(from, to, micro_batch - ahead));
    }
    return core_.messages->send(tensors, core_.rank_of(to), tag);
  }
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const bool requires_grad = tensor.requires_grad();
    tensor = tensor.detach().to(core_.stage(to).device());
    tensor.requires_grad_(requires_grad);
  }
  passed_[tag] = std::move(tensors);
}

PipelineStep::Asked& PipelineStep::ask(int64_t from, const PipelineAction& action) {
  const int tag = core_.tag_of(from, action.stage, action.micro_batch);
  Asked& asked = asked_[tag];
  if (!asked.receipt) {
    asked.purpose = "PP:" + to_string(action);
    const CallSite site(asked.purpose);
    asked.receipt = core_.messages->receive(core_.rank_of(from), tag);
  }
  return asked;
}

Tensors PipelineStep::take(int64_t from, int64_t to, int64_t micro_batch) {
  const int tag = core_.tag_of(from, to, micro_batch);
  if (core_.is_here(from)) {
    const auto passed = passed_.find(tag);
    TORCH_INTERNAL_ASSERT(passed != passed_.end());
    Tensors tensors = std::move(passed->second);
    passed_.erase(passed);
    return tensors;
  }
  const char* const kind = action_->type == ComputationType::kForward ? "RECV_F" : "RECV_B";
  const std::string name = "PP:" + std::to_string(to) + kind + std::to_string(micro_batch);
  RECORD_USER_SCOPE(name.c_str());
  awaited_ = *action_;
  awaited_->stage = from;
  Tensors tensors = ask(from, *action_).receipt->take(core_.stage(to).device());
  awaited_.reset();
  asked_.erase(tag);
  return tensors;
}

/// So that what comes from other hosts is on its way while this rank computes.
void PipelineStep::ask_ahead(size_t next) {
  const auto ask_if_far = [this](int64_t from, const PipelineAction& action) {
    if (core_.messages->is_far(core_.rank_of(from))) ask(from, action);
  };
  size_t left = has_backward_ ? kAhead : kForwardsAhead;
  for (size_t i = next + 1; i < core_.actions.size() && left > 0; ++i) {
    const PipelineAction& action = core_.actions[i];
    if (!has_backward_ && action.type != ComputationType::kForward) continue;
    --left;
    if (action.type == ComputationType::kForward) {
      for (const int64_t from : core_.sources[static_cast<size_t>(action.stage)]) ask_if_far(from, action);
    } else if (action.type != ComputationType::kBackwardWeight) {
      const auto kept = kept_.find({action.stage, action.micro_batch});
      if (kept == kept_.end()) continue;
      for (const int64_t from : kept->second.gradients_from) ask_if_far(from, action);
    }
  }
  for (auto& [tag, asked] : asked_) {
    const CallSite site(asked.purpose);
    asked.receipt->advance();
  }
}

// ---- results

std::string PipelineStep::place() const {
  if (!action_) return "between the schedule and the end of its step";
  return "in " + to_string(*action_) +
         (awaited_ ? ", which waits for what " + to_string(*awaited_) + " sends" : "");
}

Tensors PipelineStep::merged_outputs() const {
  Tensors merged;
  if (outputs_.empty()) return merged;
  const c10::NoGradGuard no_grad;
  for (size_t output = 0; output < outputs_.front().size(); ++output) {
    Tensors parts;
    for (const Tensors& one : outputs_) parts.push_back(one.at(output));
    merged.push_back(parts.front().dim() == 0 ? at::stack(parts) : at::cat(parts));
  }
  return merged;
}

}  // namespace lockstep::pipeline::internal

// Runs small models under activation_checkpoint() for activation_checkpoint_parity_test.py.
//
//     activation_checkpoint_parity_driver OUTPUT
//
// OUTPUT: a pickled ({case: [gradients]}, {case: [what ran]}).

#include <torch/torch.h>

#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/testing/driver.h>

namespace activation_checkpoint_parity_driver {
namespace {

using lockstep::activation_checkpoint;
using Options = lockstep::ActivationCheckpointOptions;

struct Result {
  c10::List<at::Tensor> gradients;
  c10::List<std::string> events;
};

at::Tensor numbers(int64_t count, double from) {
  return torch::arange(count, at::kDouble).div(count).add(from).sin();
}

/// Two layers, with dropout between them, that say how far they come.
struct Block {
  Result* result;
  at::Tensor first, second;
  std::string name;
  Block(Result& to, int index)
      : result(&to),
        first(numbers(24, index).view({4, 6}).requires_grad_()),
        second(numbers(24, 7 + index).view({6, 4}).requires_grad_()),
        name(std::to_string(index)) {}
  at::Tensor operator()(const at::Tensor& x) const {
    result->events.push_back(name + " begins");
    const at::Tensor middle = torch::dropout(x.matmul(first).tanh(), 0.5, true);
    result->events.push_back(name + " goes on");
    const at::Tensor y = middle.matmul(second).sigmoid() + x;
    result->events.push_back(name + " ends");
    return y;
  }
};

Result run(const std::string& name) {
  torch::manual_seed(11);
  Result result;
  std::vector<Block> blocks;
  for (int i = 0; i < 3; ++i) blocks.emplace_back(result, i);
  const at::Tensor input = numbers(12, 3).view({3, 4}).requires_grad_(name != "frozen input");
  const Options options{.preserve_rng_state = name != "other random numbers",
                        .early_stop = name != "to the end"};
  at::Tensor y;
  if (name == "nested") {
    const auto pair = [&](const at::Tensor& x) {
      return activation_checkpoint(options, blocks[1], activation_checkpoint(options, blocks[0], x));
    };
    y = blocks[2](activation_checkpoint(options, pair, input));
  } else {
    y = input;
    for (const auto& block : blocks) y = activation_checkpoint(options, block, y);
  }
  std::vector<at::Tensor> sources;
  if (input.requires_grad()) sources.push_back(input);
  for (const auto& block : blocks) sources.insert(sources.end(), {block.first, block.second});
  const at::Tensor loss = y.square().sum();
  std::vector<at::Tensor> gradients;
  if (name == "twice") {
    gradients = torch::autograd::grad({loss}, sources, {}, true, true);
    at::Tensor penalty = torch::zeros({}, at::kDouble);
    for (const auto& gradient : gradients) penalty = penalty + gradient.square().sum();
    gradients = torch::autograd::grad({penalty}, sources);
  } else if (name == "kept graph") {
    torch::autograd::grad({loss}, sources, {}, true);
    gradients = torch::autograd::grad({loss}, sources);
  } else if (name == "one block's gradient") {
    gradients = torch::autograd::grad({loss}, {blocks[2].second});
  } else {
    gradients = torch::autograd::grad({loss}, sources);
  }
  for (const auto& gradient : gradients) result.gradients.push_back(gradient.detach());
  result.gradients.push_back(torch::rand({4}, at::kDouble));  // where the generator stands
  return result;
}

}  // namespace

LOCKSTEP_DRIVER(activation_checkpoint_parity_driver) {
  TORCH_CHECK(argc == 2, "usage: activation_checkpoint_parity_driver OUTPUT");
  c10::Dict<std::string, c10::List<at::Tensor>> gradients;
  c10::Dict<std::string, c10::List<std::string>> events;
  for (const char* name : {"chain", "nested", "frozen input", "to the end", "other random numbers", "twice",
                           "kept graph", "one block's gradient"}) {
    const Result result = run(name);
    gradients.insert(name, result.gradients);
    events.insert(name, result.events);
  }
  lockstep::testing::write_pickle(argv[1], c10::ivalue::Tuple::create(gradients, events));
  return 0;
}

}  // namespace activation_checkpoint_parity_driver

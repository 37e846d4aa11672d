// Runs the sequences that grad_scaler_parity_test.py makes up, and writes what became of scales, gradients
// and parameters, so that they can be compared with torch.amp.GradScaler's.
//
//     grad_scaler_driver JOBS OUTPUT
//
// JOBS: a pickled {job: {"options": [init_scale, growth_factor, backoff_factor, growth_interval],
// "optimizers": n, "parameters": [tensor …], "owners": [optimizer …], "iterations": [{"weights": [tensor …],
// "script": ["word" or "word:argument" …]}]}}. A parameter's loss is the sum of its products with its
// weights; none for weights without elements. Those with one dimension more than their parameter are of a
// sparse embedding. OUTPUT: {job: {"errors", "scales", "trackers": one for each word, "gradients",
// "parameters": those of all parameters after each word}}.

#include <torch/torch.h>

#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/testing/driver.h>

namespace grad_scaler_driver {
namespace {

using lockstep::testing::at_key;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kIndices[] = {0, 0, 2};  // of the sparse embeddings: one twice

struct Run {
  explicit Run(const c10::IValue& job) {
    const auto options = lockstep::from_object<std::vector<double>>(at_key(job, "options"));
    scaler = std::make_unique<lockstep::GradScaler>(
        lockstep::GradScalerOptions{.device = at::kCPU,
                                    .init_scale = options[0],
                                    .growth_factor = options[1],
                                    .backoff_factor = options[2],
                                    .growth_interval = static_cast<int64_t>(options[3])});
    for (const auto& initial : lockstep::from_object<Tensors>(at_key(job, "parameters")))
      parameters.push_back(initial.clone().requires_grad_());
    const auto owners = lockstep::from_object<std::vector<int64_t>>(at_key(job, "owners"));
    for (int64_t i = 0; i < at_key(job, "optimizers").toInt(); ++i) {
      Tensors own;
      for (size_t j = 0; j < parameters.size(); ++j) {
        if (owners[j] == i) own.push_back(parameters[j]);
      }
      optimizers.push_back(std::make_unique<torch::optim::SGD>(own, torch::optim::SGDOptions(0.1)));
    }
  }

  at::Tensor loss(const Tensors& weights) const {
    at::Tensor total = torch::zeros({});
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (weights[i].numel() == 0) continue;
      at::Tensor used = parameters[i];
      if (weights[i].dim() > used.dim()) {
        used = torch::nn::functional::embedding(torch::tensor(at::ArrayRef<int64_t>(kIndices)).view({3, 1}),
                                                used,
                                                torch::nn::functional::EmbeddingFuncOptions().sparse(true));
      }
      total = total + (used * weights[i]).sum().to(at::kFloat);
    }
    return total;
  }

  Tensors dense_parameters() const {
    Tensors dense;
    for (const auto& parameter : parameters) {
      if (!parameter.grad().defined() || !parameter.grad().is_sparse()) dense.push_back(parameter);
    }
    return dense;
  }

  void perform(const std::string& text, const Tensors& weights) {
    const std::string word = text.substr(0, text.find(':'));
    const double number = word == text ? 0 : std::stod(text.substr(word.size() + 1));
    const auto optimizer = [&]() -> torch::optim::Optimizer& {
      return *optimizers.at(static_cast<size_t>(number));
    };
    if (word == "zero") {
      for (auto& each : optimizers) each->zero_grad();
    } else if (word == "backward") {
      scaler->scale(loss(weights)).backward();
    } else if (word == "unscale") {
      scaler->unscale_(optimizer());
    } else if (word == "clip_value") {
      lockstep::clip_grad_value_(dense_parameters(), number);
    } else if (word == "clip_value_slow") {
      lockstep::clip_grad_value_(dense_parameters(), number, /*foreach=*/false);
    } else if (word == "step") {
      scaler->step(optimizer());
    } else if (word == "update" && word == text) {
      scaler->update();
    } else if (word == "update") {
      scaler->update(number);
    } else if (word == "update_tensor") {
      scaler->update(torch::tensor({number}));
    } else if (word == "growth_factor") {
      scaler->set_growth_factor(number);
    } else if (word == "backoff_factor") {
      scaler->set_backoff_factor(number);
    } else if (word == "growth_interval") {
      scaler->set_growth_interval(static_cast<int64_t>(number));
    } else if (word == "reload") {
      const auto state = scaler->state_dict();
      scaler = std::make_unique<lockstep::GradScaler>(lockstep::GradScalerOptions{.device = at::kCPU});
      scaler->load_state_dict(state);
    } else {
      TORCH_CHECK(false, "unknown word ", text);
    }
  }

  void note(const std::string& error) {
    errors.push_back(error);
    scales.push_back(scaler->get_scale());
    trackers.push_back(lockstep::state_value<int64_t>(scaler->state_dict(), "_growth_tracker", "driver"));
    for (const auto& parameter : parameters) {
      values.push_back(parameter.detach().clone());
      const at::Tensor gradient = parameter.grad();
      gradients.push_back(!gradient.defined()    ? torch::empty({0})
                          : gradient.is_sparse() ? gradient.to_dense()
                                                 : gradient.clone());
    }
  }

  std::unique_ptr<lockstep::GradScaler> scaler;
  Tensors parameters;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  std::vector<std::string> errors;
  std::vector<double> scales;
  std::vector<int64_t> trackers;
  Tensors gradients, values;
};

c10::IValue run(const c10::IValue& job) {
  Run run(job);
  for (const c10::IValue& iteration : at_key(job, "iterations").toListRef()) {
    const auto weights = lockstep::from_object<Tensors>(at_key(iteration, "weights"));
    for (const auto& word : lockstep::from_object<std::vector<std::string>>(at_key(iteration, "script"))) {
      try {
        run.perform(word, weights);
        run.note("");
      } catch (const c10::Error& error) {
        run.note(error.what_without_backtrace());
      }
    }
  }
  return lockstep::to_object(lockstep::StateDict{{"errors", lockstep::to_object(run.errors)},
                                                 {"scales", lockstep::to_object(run.scales)},
                                                 {"trackers", lockstep::to_object(run.trackers)},
                                                 {"gradients", lockstep::to_object(run.gradients)},
                                                 {"parameters", lockstep::to_object(run.values)}});
}

}  // namespace

LOCKSTEP_DRIVER(grad_scaler_driver) {
  TORCH_CHECK(argc == 3, "usage: grad_scaler_driver JOBS OUTPUT");
  lockstep::StateDict results;
  for (const auto& entry : lockstep::testing::read_pickle(argv[1]).toGenericDict()) {
    results.emplace(entry.key().toStringRef(), run(entry.value()));
  }
  lockstep::testing::write_pickle(argv[2], lockstep::to_object(results));
  return 0;
}

}  // namespace grad_scaler_driver

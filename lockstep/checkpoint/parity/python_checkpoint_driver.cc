// Trains for python_checkpoint_test.py: a part of a run whose middle Python trains, from one torch.save file
// to the next.
//
//     python_checkpoint_driver start INPUT FOLDER     the first steps: INPUT to FOLDER/CASE.1.pt
//     python_checkpoint_driver finish INPUT FOLDER    the last ones: FOLDER/CASE.2.pt to FOLDER/CASE.3.pt,
//                                                     and with the optimizer's state by names, CASE.3n.pt
//     python_checkpoint_driver write FILE             an object of all kinds
//     python_checkpoint_driver copy FROM TO           whatever it is
//
// INPUT: {"initial": the model's state_dict, "x", "y": tensors of all steps, "steps": those of each part}.
// The files: {"epoch": next step, "model_state_dict", "optimizer_state_dict", "optimizer_by_name",
// "scheduler_state_dict", "scaler_state_dict", "ema_state_dict", "rng", "draw": the next random numbers,
// "losses", "lrs"}.
#include <iostream>

#include <torch/torch.h>

#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/optim/averaged_model.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/testing/driver.h>

namespace python_checkpoint_driver {
namespace {

namespace optim = torch::optim;
namespace schedules = lockstep::lr_scheduler;
using lockstep::from_object;
using lockstep::StateDict;
using lockstep::to_object;

/// With `reversed`, the layers' names are the same and their order is not.
struct Net : torch::nn::Module {
  explicit Net(bool reversed = false) {
    if (!reversed) register_module("first", first), register_module("norm", norm);
    register_module("second", second);
    if (reversed) register_module("norm", norm), register_module("first", first);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
  // Without a bias, whose gradient before the norm would be nothing but rounding, which Adam makes large.
  torch::nn::Linear first{torch::nn::LinearOptions(8, 16).bias(false)};
  torch::nn::BatchNorm1d norm{16};
  torch::nn::Linear second{16, 4};
};

/// As Python's Module.to(): LibTorch's would convert BatchNorm's counter, too.
void to_floating(torch::nn::Module& module, at::ScalarType type) {
  for (auto tensors : {module.parameters(), module.buffers()}) {
    for (at::Tensor& tensor : tensors) {
      if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(type));
    }
  }
}

struct Training {
  Training(const std::string& name, bool reversed)
      : net(std::make_shared<Net>(reversed)),
        scaler({.device = at::kCPU, .init_scale = 1024, .growth_interval = 7}) {
    if (name == "sgd") {
      optimizer = std::make_unique<optim::SGD>(
          net->parameters(), optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3).nesterov(true));
      scheduler = std::make_unique<schedules::OneCycleLR>(*optimizer, 0.1,
                                                          schedules::OneCycleLROptions{.total_steps = 40});
    } else if (name == "adam") {
      optimizer = std::make_unique<optim::Adam>(
          net->parameters(), optim::AdamOptions(0.01).betas({0.8, 0.99}).weight_decay(1e-3).amsgrad(true));
      scheduler = std::make_unique<schedules::CosineAnnealingLR>(*optimizer, 25, 1e-3);
    } else if (name == "adamw") {
      std::vector<at::Tensor> decayed, others;
      for (const auto& item : net->named_parameters())
        (item.value().dim() > 1 ? decayed : others).push_back(item.value());
      std::vector<optim::OptimizerParamGroup> groups;
      groups.emplace_back(decayed,
                          std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(0.01).weight_decay(0.1)));
      groups.emplace_back(
          others, std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(0.02).weight_decay(0.001)));
      optimizer = std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.01));
      scheduler = std::make_unique<schedules::LinearLR>(*optimizer, 0.3, 1.0, 15);
    } else if (name == "rmsprop") {
      optimizer = std::make_unique<optim::RMSprop>(
          net->parameters(), optim::RMSpropOptions(0.001).momentum(0.5).centered(true).alpha(0.9));
      scheduler = std::make_unique<schedules::MultiStepLR>(*optimizer, std::vector<int64_t>{5, 5, 17}, 0.5);
    } else if (name == "adagrad") {
      optimizer = std::make_unique<optim::Adagrad>(
          net->parameters(), optim::AdagradOptions(0.05).lr_decay(0.01).initial_accumulator_value(0.1));
      scheduler = std::make_unique<schedules::ExponentialLR>(*optimizer, 0.97);
    } else {
      TORCH_CHECK(name == "lbfgs", "unknown case ", name);
      closure = true;
      to_floating(*net, at::kDouble);  // its line searches make rounding large
      optimizer = std::make_unique<optim::LBFGS>(
          net->parameters(),
          optim::LBFGSOptions(0.5).max_iter(3).history_size(5).line_search_fn("strong_wolfe"));
      scheduler = std::make_unique<schedules::StepLR>(*optimizer, 8, 0.5);
    }
    ema = std::make_unique<lockstep::swa_utils::AveragedModel<Net>>(
        net,
        lockstep::swa_utils::AveragedModelOptions{.multi_avg_fn =
                                                      lockstep::swa_utils::get_ema_multi_avg_fn(0.9)},
        [this, reversed] {
          auto copy = std::make_shared<Net>(reversed);
          to_floating(*copy, net->second->weight.scalar_type());
          return copy;
        });
  }

  void load(const StateDict& state, bool by_name) {
    const auto part = [&](const char* key) { return from_object<StateDict>(state.at(key)); };
    // As DistributedDataParallel in Python saves it.
    lockstep::load_state_dict(net, part("ddp_state_dict"), {.key_map = {lockstep::strip_prefix("module.")}});
    if (by_name) {
      lockstep::set_optimizer_state_dict(net, *optimizer, part("optimizer_by_name"));
    } else {
      lockstep::load_state_dict(*optimizer, part("optimizer_state_dict"));
    }
    scheduler->load_state_dict(part("scheduler_state_dict"));
    scaler.load_state_dict(part("scaler_state_dict"));
    lockstep::load_state_dict(*ema, part("ema_state_dict"));
    lockstep::set_rng_state({{"cpu", state.at("rng")}});
  }

  void step(const torch::Tensor& x, const torch::Tensor& y) {
    at::Tensor loss;
    if (closure) {
      loss = optimizer->step([&] {
        optimizer->zero_grad();
        at::Tensor value = torch::nn::functional::cross_entropy(net->forward(x), y);
        value.backward();
        return value;
      });
    } else {
      optimizer->zero_grad();
      loss = torch::nn::functional::cross_entropy(net->forward(x), y);
      scaler.scale(loss).backward();
      scaler.step(*optimizer);
      scaler.update();
    }
    losses.push_back(loss.item<double>());
    scheduler->step();
    lrs.push_back(scheduler->get_last_lr().back());
    ema->update_parameters(*net);
  }

  void save(const std::string& path, int64_t epoch) {
    StateDict state{{"epoch", epoch},
                    {"model_state_dict", to_object(lockstep::state_dict(net))},
                    {"optimizer_state_dict", to_object(lockstep::state_dict(*optimizer))},
                    {"optimizer_by_name", to_object(lockstep::get_optimizer_state_dict(net, *optimizer))},
                    {"scheduler_state_dict", to_object(scheduler->state_dict())},
                    {"scaler_state_dict", to_object(scaler.state_dict())},
                    {"ema_state_dict", to_object(lockstep::state_dict(*ema))},
                    {"losses", to_object(losses)},
                    {"lrs", to_object(lrs)}};
    state["rng"] = lockstep::get_rng_state().at("cpu");
    state["draw"] = at::rand({5});
    lockstep::save_python_checkpoint(state, path);
  }

  std::shared_ptr<Net> net;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<schedules::LRScheduler> scheduler;
  lockstep::GradScaler scaler;
  std::unique_ptr<lockstep::swa_utils::AveragedModel<Net>> ema;
  bool closure = false;
  std::vector<double> losses, lrs;
};

void train(const std::string& mode, const std::string& input, const std::string& folder) {
  const StateDict inputs = lockstep::load_python_checkpoint(input);
  const at::Tensor x = inputs.at("x").toTensor(), y = inputs.at("y").toTensor();
  const int64_t steps = inputs.at("steps").toInt();
  for (const std::string name : {"sgd", "adam", "adamw", "rmsprop", "adagrad", "lbfgs"}) {
    for (const bool by_name : {false, true}) {
      const bool start = mode == "start";
      if (start && by_name) continue;
      Training training(name, /*reversed=*/by_name && name != "lbfgs");
      int64_t epoch = 0;
      if (start) {
        torch::manual_seed(1234);
        lockstep::load_state_dict(training.net, from_object<StateDict>(inputs.at("initial")));
        lockstep::load_state_dict(training.ema->module, from_object<StateDict>(inputs.at("initial")));
      } else {
        const StateDict state = lockstep::load_python_checkpoint(folder + "/" + name + ".2.pt");
        training.load(state, by_name);
        epoch = state.at("epoch").toInt();
      }
      for (const int64_t end = epoch + steps; epoch < end; ++epoch)
        training.step(x[epoch].to(training.net->second->weight.scalar_type()), y[epoch]);
      training.save(folder + "/" + name + (start ? ".1.pt" : by_name ? ".3n.pt" : ".3.pt"), epoch);
    }
  }
}

/// What python_checkpoint_test.py expects.
void write(const std::string& path) {
  const at::Tensor matrix = at::arange(12, at::kFloat).view({3, 4});
  StateDict object{{"none", {}},
                   {"true", true},
                   {"int", int64_t{-3}},
                   {"large", int64_t{1} << 60},
                   {"float", 0.1},
                   {"complex", c10::complex<double>(1, -2)},
                   {"text", "Grüße"},
                   {"bytes", std::string("\xff\x00\x80", 3)},
                   {"list", to_object(std::vector<c10::IValue>{1, "a", to_object(std::vector<int64_t>{})})},
                   {"tuple", to_object(std::tuple(0.9, 0.999))},
                   {"by number", to_object(std::map<int64_t, std::string>{{0, "zero"}, {300, "many"}})},
                   {"device", c10::Device("cuda:1")},
                   {"matrix", matrix},
                   {"again", matrix},
                   {"transposed", matrix.t()},
                   {"column", matrix.select(1, 2)},
                   {"expanded", at::ones({1}).expand({4})},
                   {"scalar", at::scalar_tensor(2.5, at::kDouble)},
                   {"empty", at::empty({0, 3}, at::kLong)}};
  for (const auto type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
                          at::kBFloat16, at::kDouble, at::kComplexFloat, at::kUInt16, at::kFloat8_e4m3fn}) {
    object[std::string("dtype ") + c10::toString(type)] = at::arange(2, at::kFloat).to(type);
  }
  lockstep::save_python_checkpoint(object, path);
}

}  // namespace

LOCKSTEP_DRIVER(python_checkpoint_driver) try {
  const std::string mode = argc > 1 ? argv[1] : "";
  torch::set_num_threads(1);
  if (argc == 4 && (mode == "start" || mode == "finish")) {
    train(mode, argv[2], argv[3]);
  } else if (argc == 3 && mode == "write") {
    write(argv[2]);
  } else if (argc == 4 && mode == "copy") {
    lockstep::save_python_object(lockstep::load_python_object(argv[2]), argv[3]);
  } else {
    TORCH_CHECK(false,
                "usage: python_checkpoint_driver start|finish INPUT FOLDER | write FILE | copy FROM TO");
  }
  return 0;
} catch (const c10::Error& error) {
  std::cerr << "python_checkpoint_driver: " << error.what_without_backtrace() << std::endl;
  return 1;
}

}  // namespace python_checkpoint_driver

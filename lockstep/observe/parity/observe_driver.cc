// Writes what observe_test.py reads with TensorBoard.
//
//     observe_driver tensorboard DIR | resume DIR | runs DIR | end DIR HOW COUNT | cost DIR COUNT
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

#include <torch/torch.h>

#include <lockstep/observe/progress_bar.h>
#include <lockstep/observe/summary_writer.h>
#include <lockstep/testing/driver.h>

namespace observe_driver {
namespace {

using lockstep::SummaryWriter;

/// The same calls as observe_test.py's python_calls().
void write_all_kinds(const std::string& folder) {
  const double infinity = std::numeric_limits<double>::infinity();
  SummaryWriter writer(folder, {.purge_step = 3, .filename_suffix = ".cc"});
  for (int64_t step = 0; step < 5; ++step) {
    writer.add_scalar("train/loss", 1.0 / static_cast<double>(step + 1), step,
                      100.5 + static_cast<double>(step));
  }
  writer.add_scalar("no step", 7);
  writer.add_scalar("values", std::nan(""), -1, 1.0);
  writer.add_scalar("values", infinity, std::numeric_limits<int64_t>::max(), 2.0);
  writer.add_scalar("values", -1e300, 2, 3.0);
  writer.add_scalar("tensor", torch::tensor({{2.5}}, torch::kBFloat16), 1);
  writer.add_scalar("new", 0.1, 1, 4.0, /*new_style=*/true);
  writer.add_scalar("new double", 0.1, 1, 4.0, true, /*double_precision=*/true);
  writer.add_scalars("main/tag", {{"a", 1.5}, {"b", 2.5}}, 3, 5.0);
  writer.add_scalars("main/tag", {{"a", 3.5}}, 4, 6.0);

  torch::manual_seed(0);
  const auto normal = torch::randn({20, 30});
  writer.add_histogram("normal", normal, 1);
  writer.add_histogram("wide", (normal * 10).exp().to(torch::kHalf).clamp_max(6e4), 2);
  writer.add_histogram("whole", torch::arange(-5, 100), 3);
  writer.add_histogram("equal", torch::full({3}, 2.0), 4, int64_t{10});
  writer.add_histogram("ten", normal, 5, int64_t{10});
  writer.add_histogram("edges", normal, 6, std::vector<double>{-1, 0, 0.5, 3});
  writer.add_histogram("few", normal, 7, "tensorflow", std::nullopt, 100);
  writer.add_histogram("seven", normal, 8, int64_t{23}, std::nullopt, 7);
  writer.add_histogram("zeros", torch::zeros({4}), 9);
  writer.add_histogram_raw("raw", 0, 9, 10, 45, 285, {3, 6, 9}, {3, 3, 4}, 10);

  const auto colors = torch::rand({3, 5, 7});
  writer.add_image("chw", colors * 1.5 - 0.2, 1);
  writer.add_image("hwc", (colors * 255).to(torch::kByte).permute({1, 2, 0}), 2, std::nullopt, "HWC");
  writer.add_image("hw", colors[0].to(torch::kDouble), 3, std::nullopt, "hw");
  writer.add_image("wh", colors[0], 4, std::nullopt, "WH");
  writer.add_image("gray", colors.narrow(0, 0, 1), 5);
  writer.add_image("rgba", torch::rand({4, 6, 6}), 6);
  writer.add_images("batch", torch::rand({11, 3, 4, 5}), 7);
  writer.add_images("gray batch", torch::rand({2, 4, 5, 1}), 8, std::nullopt, "NHWC");

  writer.add_text("notes", "**größer** \xe2\x86\x92 kleiner", 1, 7.0);
  writer.add_hparams({{"lr", 0.1}, {"layers", int64_t{3}}, {"optimizer", std::string("AdamW")}},
                     {{"hparam/accuracy", 0.9}, {"hparam/loss", 0.2}},
                     {{"lr", {0.1, 0.01}}, {"optimizer", {std::string("SGD"), std::string("AdamW")}}},
                     "trial", 5);
}

/// Two runs in one folder; the second takes over at step 6.
void resume(const std::string& folder) {
  {
    SummaryWriter first(folder);
    first.log_hyperparameters({{"lr", 0.1}, {"nesterov", true}});
    for (int64_t step = 0; step < 10; ++step) first.log_metrics({{"loss", 1}, {"lr", 0.1}}, step);
  }
  SummaryWriter second(folder);
  second.resume(6);
  second.log_hyperparameters({{"lr", 0.1}, {"nesterov", true}});
  for (int64_t step = 6; step < 8; ++step) second.log_metrics({{"loss", 2}}, step);
  second.finalize("failed");
}

/// Logs and ends as told, without any clean-up.
void end(const std::string& folder, const std::string& how, int64_t count) {
  auto* writer = new SummaryWriter(folder, {.max_queue = count + 1});
  for (int64_t step = 0; step < count; ++step) writer->add_scalar("loss", 1, step);
  if (how == "exit") std::exit(0);
  if (how == "abort") std::abort();
  if (how == "throw") throw std::runtime_error("thrown to end");
  if (how == "terminate") std::raise(SIGTERM);
  if (how == "segfault") std::raise(SIGSEGV);
  if (how == "kill") {
    std::cout << "ready" << std::endl;  // and is killed from outside
    while (true) ::pause();
  }
  throw std::invalid_argument("no way to end: " + how);
}

/// Two spirals, told apart by a small network, at three learning rates: for scripts/plot-tensorboard.
void train_runs(const std::string& folder) {
  torch::manual_seed(0);
  const auto turn = torch::rand({600}) * 9 + 1;
  const auto target = torch::arange(600).remainder(2);
  const auto angle = turn + target * 3.14159265;
  const auto data =
      torch::stack({turn * angle.cos(), turn * angle.sin()}, 1) / 10 + torch::randn({600, 2}) * 0.01;
  for (const double lr : {0.003, 0.01, 0.03}) {
    torch::manual_seed(1);
    std::ostringstream name;
    name << "lr" << lr;
    SummaryWriter writer(folder + "/" + name.str());
    torch::nn::Sequential net(torch::nn::Linear(2, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                              torch::nn::Tanh(), torch::nn::Linear(64, 2));
    torch::optim::Adam optimizer(net->parameters(), lr);
    for (int64_t step = 0; step < 400; ++step) {
      const auto index = torch::randint(600, {64});
      const auto loss =
          torch::cross_entropy_loss(net->forward(data.index_select(0, index)), target.index_select(0, index));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      writer.add_scalar("train/loss", loss, step);
      if (step % 20 != 0) continue;
      torch::NoGradGuard no_grad;
      const auto right = net->forward(data).argmax(1).eq(target).to(torch::kFloat).mean();
      writer.add_scalar("validation/accuracy", right, step);
      for (const auto& parameter : net->named_parameters())
        writer.add_histogram(parameter.key(), parameter.value(), step);
      const auto axis = torch::linspace(-1, 1, 96);
      const auto grid = torch::meshgrid({axis, axis}, "xy");
      const auto surface =
          net->forward(torch::stack({grid[0], grid[1]}, 2).view({-1, 2})).softmax(1).select(1, 1);
      writer.add_image("decision", surface.view({96, 96}), step, std::nullopt, "HW");
    }
    writer.log_hyperparameters({{"lr", lr}, {"optimizer", std::string("Adam")}});
    writer.finalize("finished");
  }
}

template <class Call>
double nanoseconds(int64_t count, const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) call(i);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(count);
}

/// What calls cost the caller, in nanoseconds.
void cost(const std::string& folder, int64_t count) {
  SummaryWriter writer(folder);
  std::cout << "add_scalar, one after the other: " << nanoseconds(count, [&](int64_t step) {
    writer.add_scalar("train/loss", 0.5, step);
  }) << " ns\n";
  writer.flush();
  double sum = 0;
  for (int64_t step = 0; step < 1000; ++step) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1));  // a training step, in which the thread falls asleep
    sum += nanoseconds(1, [&](int64_t) { writer.add_scalar("train/loss", 0.5, step); });
  }
  std::cout << "add_scalar, one each millisecond: " << sum / 1000 << " ns\n";
  lockstep::ProgressBar quiet(count, "", {.quiet = true});
  std::cout << "ProgressBar::update, quiet: " << nanoseconds(count, [&](int64_t) { quiet.update(); })
            << " ns\n";
  lockstep::ProgressBar bar(count, "", {.terminal = true});
  std::cout << "ProgressBar::update, on a terminal: " << nanoseconds(count, [&](int64_t) { bar.update(); })
            << " ns\n";
}

}  // namespace

LOCKSTEP_DRIVER(observe_driver) {
  const std::string command = argc > 2 ? argv[1] : "";
  if (command == "tensorboard") {
    write_all_kinds(argv[2]);
  } else if (command == "resume") {
    resume(argv[2]);
  } else if (command == "runs") {
    train_runs(argv[2]);
  } else if (command == "end" && argc == 5) {
    // An exception ends the process, as in a program that does not catch it.
    [&]() noexcept { end(argv[2], argv[3], std::stoll(argv[4])); }();
  } else if (command == "cost" && argc == 4) {
    cost(argv[2], std::stoll(argv[3]));
  } else {
    std::cerr << "usage: observe_driver tensorboard DIR | resume DIR | runs DIR | end DIR HOW COUNT | cost "
                 "DIR COUNT\n";
    return 2;
  }
  return 0;
}

}  // namespace observe_driver

// Times steps of pipelines, as scripts/bench commands; by hand:
//
//     lockstep run --nproc-per-node 2 bench_pipeline 1F1B sleep 4 1
//
// The operation is a schedule; the argument what stages compute: `sleep` (layers that only sleep, so that cores don't matter:
// 10 ms each for forward, the gradients of the inputs, and those of the weights), `wide` (the same with 512 KiB a micro-batch),
// `empty` (next to nothing: the overhead of an action), or `transformer` (12 layers). peers/python_pipeline.py does the same
// with torch.distributed.pipelining.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/schedule_times.h>

#include "command_loop.h"
#include "init_options.h"

namespace {

namespace nn = torch::nn;
using lockstep::PipelineRunner;
using lockstep::PipelineSchedule;
using lockstep::PipelineStage;
using lockstep::benchmarks::Command;
using lockstep::benchmarks::Timings;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMicroBatches = 8;
constexpr auto kNap = std::chrono::milliseconds(10);

std::vector<int64_t> naps;  // how long each took since the list was emptied

void nap(std::chrono::nanoseconds time) {
  const int64_t before = lockstep::benchmarks::wall_clock();
  std::this_thread::sleep_for(time);
  naps.push_back(lockstep::benchmarks::wall_clock() - before);
}

/// Its forward and its backward sleep; of the input, in both.
struct SleepyInput : torch::autograd::Function<SleepyInput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t ns) {
    context->saved_data["ns"] = ns;
    nap(std::chrono::nanoseconds(ns));
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    nap(std::chrono::nanoseconds(context->saved_data["ns"].toInt()));
    return {gradients[0], at::Tensor()};
  }
};
/// Of the weight, in backward alone.
struct SleepyWeight : torch::autograd::Function<SleepyWeight> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, int64_t ns) {
    context->saved_data["ns"] = ns;
    return weight.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    nap(std::chrono::nanoseconds(context->saved_data["ns"].toInt()));
    return {gradients[0], at::Tensor()};
  }
};

/// Like a layer of `parts` stages in the place of one.
struct Sleepy : nn::Module {
  Sleepy(int64_t parts, int64_t features)
      : ns(std::chrono::nanoseconds(kNap).count() / parts),
        weight(register_parameter("weight", torch::ones({features}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return SleepyInput::apply(x, ns) * SleepyWeight::apply(weight, ns);
  }
  int64_t ns;
  at::Tensor weight;
};

struct Scale : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight = register_parameter("weight", torch::ones({64}));
};

/// Of a micro-batch of layers that sleep or do next to nothing.
int64_t features(const std::string& what) {
  return what == "wide" ? 128 << 10 : 64;
}

constexpr int64_t kLayers = 12, kWidth = 256, kHeads = 4, kLength = 64, kRows = 2;

/// torch.nn.TransformerEncoderLayer without dropout, with its operators. LibTorch's layer of that name computes the attention's
/// weights as well, which nothing uses, and so has others.
struct EncoderLayer : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const int64_t length = x.size(0), rows = x.size(1);
    const auto projected = in(x).unflatten(-1, {3, kWidth}).movedim(-2, 0).contiguous();
    const auto heads = [&](int64_t which) {
      return projected[which]
          .view({length, rows * kHeads, kWidth / kHeads})
          .transpose(0, 1)
          .view({rows, kHeads, length, kWidth / kHeads});
    };
    const auto attended = at::scaled_dot_product_attention(heads(0), heads(1), heads(2));
    const auto merged = attended.permute({2, 0, 1, 3}).contiguous().view({length, rows, kWidth});
    const auto y = norm_of_attention(x + out(merged));
    return norm(y + narrow(torch::relu(widen(y))));
  }
  nn::Linear in = register_module("in", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::Linear widen = register_module("widen", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear narrow = register_module("narrow", nn::Linear(4 * kWidth, kWidth));
  nn::LayerNorm norm_of_attention = register_module("norm_of_attention", nn::LayerNorm(layer_norm()));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(layer_norm()));

 private:
  static nn::LayerNormOptions layer_norm() { return nn::LayerNormOptions({kWidth}); }
};

struct Work {
  std::vector<std::shared_ptr<nn::Module>> modules;
  std::unique_ptr<PipelineRunner> pipeline;
  at::Tensor input, target;
  lockstep::PipelineShape shape;
};

bool is_interleaved(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::kInterleaved1F1B ||
         schedule == PipelineSchedule::kInterleavedZeroBubble;
}

at::Tensor mean_of_squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

Work make_work(PipelineSchedule schedule, const std::string& what) {
  const int64_t rank = lockstep::get_rank(), ranks = lockstep::get_world_size();
  Work work;
  work.shape = {ranks, is_interleaved(schedule) ? 2 : 1, kMicroBatches};
  const int64_t stages = ranks * work.shape.stages_per_rank;
  const bool sleeps = what == "sleep" || what == "wide";
  std::vector<PipelineStage> own;
  for (int64_t stage = rank; stage < stages; stage += ranks) {
    torch::manual_seed(stage);
    if (sleeps) {
      const auto module = std::make_shared<Sleepy>(work.shape.stages_per_rank, features(what));
      own.emplace_back(module, stage, stages);
      work.modules.push_back(module);
    } else if (what == "empty") {
      const auto module = std::make_shared<Scale>();
      own.emplace_back(module, stage, stages);
      work.modules.push_back(module);
    } else {
      TORCH_CHECK_VALUE(what == "transformer", "there is no '", what,
                        "'; there are sleep, wide, empty and transformer");
      nn::Sequential layers;
      for (int64_t layer = 0; layer < kLayers / stages; ++layer) {
        layers->push_back(std::make_shared<EncoderLayer>());
      }
      own.emplace_back(layers, stage, stages);
      work.modules.push_back(layers.ptr());
    }
  }
  work.pipeline = std::make_unique<PipelineRunner>(
      std::move(own), lockstep::PipelineOptions{
                          .schedule = schedule, .n_microbatches = kMicroBatches, .loss_fn = mean_of_squares});
  work.input = what == "transformer" ? torch::randn({kMicroBatches * kRows, kLength, kWidth})
                                     : torch::randn({kMicroBatches, features(what)});
  work.target = torch::zeros_like(work.input);
  work.input.requires_grad_(sleeps);  // or the first stage's backward would be shorter than the others'
  return work;
}

/// How long a step would take if nothing but the ranks' naps in it took time, each as long as it did. `table`: of all ranks.
double theory_of(const lockstep::PipelineTable& table, const std::vector<at::Tensor>& naps_of_ranks,
                 int64_t step) {
  std::map<std::tuple<int64_t, lockstep::ComputationType, int64_t>, double> durations;
  for (size_t rank = 0; rank < table.size(); ++rank) {
    const int64_t* next = naps_of_ranks[rank].data_ptr<int64_t>() + step * naps_of_ranks[rank].size(1);
    for (const auto& action : table[rank]) {
      if (!action) continue;
      auto& duration = durations[{action->stage, action->type, action->micro_batch}];
      duration = static_cast<double>(*next++);
      if (action->type == lockstep::ComputationType::kFullBackward) duration += static_cast<double>(*next++);
    }
  }
  return lockstep::pipeline_times(table,
                                  [&](const lockstep::PipelineAction& action) {
                                    return durations.at({action.stage, action.type, action.micro_batch});
                                  })
      .end;
}

/// Of each step, on rank 0.
std::vector<double> theories(const lockstep::PipelineTable& table, const std::vector<int64_t>& own_naps,
                             int64_t steps) {
  const at::Tensor own = torch::tensor(own_naps, at::kLong).view({steps, -1});
  std::vector<at::Tensor> of_ranks;
  for (int rank = 0; rank < lockstep::get_world_size(); ++rank) of_ranks.push_back(torch::empty_like(own));
  lockstep::all_gather(of_ranks, own);
  std::vector<double> result;
  for (int64_t step = 0; step < steps; ++step) result.push_back(theory_of(table, of_ranks, step));
  return result;
}

Timings time_steps(Work& work, PipelineSchedule schedule, const Command& command) {
  const auto step = [&] {
    for (const auto& module : work.modules) module->zero_grad();
    work.pipeline->step({work.input}, work.target, nullptr, /*return_outputs=*/false);
  };
  for (int64_t i = 0; i < command.warmup; ++i) step();
  naps.clear();
  Timings timings;
  lockstep::barrier();
  const int64_t cpu = lockstep::benchmarks::cpu_clock();
  for (int64_t i = 0; i < command.iterations; ++i) {
    lockstep::barrier();
    const int64_t before = lockstep::benchmarks::wall_clock();
    step();
    lockstep::barrier();
    timings.wall.push_back(lockstep::benchmarks::wall_clock() - before);
  }
  timings.cpu = {(lockstep::benchmarks::cpu_clock() - cpu) / command.iterations};
  timings.facts["actions"] = static_cast<double>(work.pipeline->actions().size());
  if (!naps.empty()) {
    // A nap takes longer than it is told to, and some take longer than others.
    auto all = theories(pipeline_table(schedule, work.shape), naps, command.iterations);
    std::sort(all.begin(), all.end());
    timings.facts["theory_ns"] = all[all.size() / 2];
  }
  return timings;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    at::set_num_threads(1);
    auto world = lockstep::init_process_group(lockstep::benchmarks::init_options());
    std::map<std::pair<std::string, std::string>, Work> works;
    return lockstep::benchmarks::serve(argc, argv, world.rank(), [&](const Command& command) {
      const auto schedule = lockstep::parse_pipeline_schedule(command.operation);
      auto& work = works[{command.operation, command.argument}];
      if (!work.pipeline) work = make_work(schedule, command.argument);
      return time_steps(work, schedule, command);
    });
  });
}

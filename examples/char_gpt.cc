// Trains a small GPT to write like a text, character by character, data-parallel or as a pipeline, and lets it write.
//
//     bible gen1:1-rev22:21 > kjv.txt                   # Debian's bible-kjv: the King James Bible, 4.3 MB
//     lockstep run --nproc-per-node 2 ./char_gpt --data kjv.txt
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>

#include "device_option.h"

namespace {

namespace nn = torch::nn;
namespace lr = lockstep::lr_scheduler;
using lockstep::data::TextDataset;
using lockstep::data::TextVocabulary;
using torch::Tensor;

struct Settings {
  std::string data;
  bool bytes = false;
  int64_t block_size = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t width = 128;
  int64_t batch_size = 32;
  int64_t micro_batches = 4;
  int64_t steps = 1000;
  int64_t warm_up = 100;
  double learning_rate = 2e-3;
  double max_norm = 1.0;
  int64_t sample = 400;
  std::string prompt = "\n";
  double temperature = 0.8;
  int64_t seed = 0;
  std::string device = "auto";
  std::string strategy = "ddp";
};

/// Each character looks at those before it: B×T×width to B×T×width.
struct Attention : nn::Module {
  Attention(int64_t width, int64_t heads)
      : heads(heads),
        query_key_value(register_module("query_key_value", nn::Linear(width, 3 * width))),
        output(register_module("output", nn::Linear(width, width))) {}

  Tensor forward(const Tensor& x) {
    const int64_t batch = x.size(0);
    const int64_t length = x.size(1);
    // 3×B×heads×T×(width / heads)
    const auto parts = query_key_value(x).view({batch, length, 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto seen = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                                       /*dropout_p=*/0.0, /*is_causal=*/true);
    return output(seen.transpose(1, 2).reshape({batch, length, -1}));
  }

  int64_t heads;
  nn::Linear query_key_value;
  nn::Linear output;
};

/// Attention, then a small network on each character by itself; both add to what comes in.
struct Block : nn::Module {
  Block(int64_t width, int64_t heads)
      : attention(register_module("attention", std::make_shared<Attention>(width, heads))),
        norm_1(register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm_2(register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        widen(register_module("widen", nn::Linear(width, 4 * width))),
        narrow(register_module("narrow", nn::Linear(4 * width, width))) {}

  Tensor forward(const Tensor& x) {
    const auto y = x + attention->forward(norm_1(x));
    return y + narrow(torch::gelu(widen(norm_2(y))));
  }

  std::shared_ptr<Attention> attention;
  nn::LayerNorm norm_1;
  nn::LayerNorm norm_2;
  nn::Linear widen;
  nn::Linear narrow;
};

/// Which part of a model: all of it, or one stage of a pipeline.
struct Part {
  int64_t index = 0;
  int64_t count = 1;
  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == count; }
};

/// From B×T characters to the B×T×vocabulary scores of those that follow (Radford and others, GPT-2, 2019); or a part of that,
/// which takes and gives B×T×width between the parts.
struct Gpt : nn::Module {
  Gpt(int64_t vocabulary, const Settings& settings, const Part& part = {})
      : part(part), blocks(register_module("blocks", nn::ModuleList())) {
    if (part.is_first()) {
      characters = register_module("characters", nn::Embedding(vocabulary, settings.width));
      positions = register_module("positions", nn::Embedding(settings.block_size, settings.width));
    }
    const int64_t begin = settings.layers * part.index / part.count;
    const int64_t end = settings.layers * (part.index + 1) / part.count;
    for (int64_t layer = begin; layer < end; ++layer) {
      blocks->push_back(std::make_shared<Block>(settings.width, settings.heads));
    }
    if (part.is_last()) {
      norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({settings.width})));
      scores =
          register_module("scores", nn::Linear(nn::LinearOptions(settings.width, vocabulary).bias(false)));
    }
    torch::NoGradGuard no_grad;
    for (const auto& item : named_parameters()) {
      if (item.value().dim() == 2) item.value().normal_(0, 0.02);
      if (item.key().ends_with("bias")) item.value().zero_();
    }
  }

  Tensor forward(const Tensor& given) {
    auto x = given;
    if (part.is_first()) x = characters(given) + positions(torch::arange(given.size(1), given.options()));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return part.is_last() ? scores(norm(x)) : x;
  }

  Part part;
  nn::Embedding characters{nullptr};
  nn::Embedding positions{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear scores{nullptr};
};

/// Weight decay for matrices; biases, norms and gains go without.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const std::vector<Tensor>& parameters,
                                                                double learning_rate) {
  std::vector<Tensor> matrices;
  std::vector<Tensor> others;
  for (const auto& parameter : parameters) (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  const auto options = [&](double weight_decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(learning_rate).weight_decay(weight_decay).betas({0.9, 0.99}));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, options(0.1));
  groups.emplace_back(others, options(0.0));
  return groups;
}

Tensor loss_of(const Tensor& scores, const Tensor& target) {
  return nn::functional::cross_entropy(scores.flatten(0, 1), target.flatten());
}

/// What differs between data parallelism with a model for each rank, with one on the host, and a pipeline.
struct Training {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  /// Adds to the gradients, and gives the loss; 0 on ranks of a pipeline that don't know it.
  std::function<Tensor(const lockstep::data::Example& batch)> compute_gradients;
  std::function<Tensor(double max_norm)> clip_grad_norm_;
  /// The scores of the character that follows a text of one row.
  std::function<Tensor(const Tensor& text)> score_next;
  bool all_ranks_score;  // for each has a part of the model
};

/// Each rank has a part of the layers, and all have the same batches.
Training make_pipeline(const std::shared_ptr<Gpt>& gpt, int64_t vocabulary, const Settings& settings) {
  const lockstep::PipelineStage stage(gpt, gpt->part.index, gpt->part.count);
  auto pipeline = std::make_shared<lockstep::PipelineRunner>(
      stage, lockstep::PipelineOptions{.n_microbatches = settings.micro_batches, .loss_fn = loss_of});
  auto writer = std::make_shared<lockstep::PipelineRunner>(stage, lockstep::PipelineOptions{});
  const bool is_last = stage.is_last();
  const int last = static_cast<int>(stage.num_stages()) - 1;
  return {.optimizer = std::make_unique<torch::optim::AdamW>(
              parameter_groups(gpt->parameters(), settings.learning_rate),
              torch::optim::AdamWOptions(settings.learning_rate)),
          .compute_gradients =
              [pipeline, is_last](const lockstep::data::Example& batch) {
                std::vector<Tensor> losses;
                pipeline->step({batch.data}, batch.target, &losses, /*return_outputs=*/false);
                return is_last ? torch::stack(losses).mean() : torch::zeros({}, batch.data.device());
              },
          .clip_grad_norm_ = [pipeline](double max_norm) { return pipeline->clip_grad_norm_(max_norm); },
          .score_next =
              [writer, is_last, last, vocabulary](const Tensor& text) {
                const auto outputs = writer->eval({text});
                auto scores = torch::empty({1, vocabulary}, text.device());
                if (is_last) scores.copy_(outputs[0].select(1, -1));
                lockstep::broadcast(scores, last);
                return scores;
              },
          .all_ranks_score = true};
}

template <class Model>
Training make_data_parallel(const std::shared_ptr<Model>& model, const std::shared_ptr<Gpt>& gpt) {
  return {.optimizer = nullptr,
          .compute_gradients =
              [model](const lockstep::data::Example& batch) {
                auto loss = loss_of((*model)(batch.data), batch.target);
                loss.backward();
                return loss.detach();
              },
          .clip_grad_norm_ = nullptr,
          .score_next = [gpt](const Tensor& text) { return gpt->forward(text).select(1, -1); },
          .all_ranks_score = false};
}

Training make_training(const std::shared_ptr<Gpt>& gpt, int64_t vocabulary, const Settings& settings) {
  if (settings.strategy == "pipeline") return make_pipeline(gpt, vocabulary, settings);
  const torch::optim::AdamWOptions options(settings.learning_rate);
  if (settings.strategy == "fsdp") {
    auto model = std::make_shared<lockstep::FullyShardedDataParallel<Gpt>>(
        gpt, lockstep::FullyShardedDataParallelOptions{
                 .sharding_strategy = lockstep::fsdp::ShardingStrategy::HYBRID_SHARD,
                 .auto_wrap_policy = lockstep::fsdp::module_wrap_policy<Block>(),
                 .sync_module_states = true});
    Training training = make_data_parallel(model, gpt);
    training.optimizer = model->make_optimizer<torch::optim::AdamW>(
        parameter_groups(model->parameters(), settings.learning_rate), options);
    training.clip_grad_norm_ = [model](double max_norm) { return model->clip_grad_norm_(max_norm); };
    training.all_ranks_score = model->gathers();  // on devices
    training.score_next = [model](const Tensor& text) { return (*model)(text).select(1, -1); };
    return training;
  }
  auto model = std::make_shared<lockstep::DistributedDataParallel<Gpt>>(gpt);
  Training training = make_data_parallel(model, gpt);
  training.optimizer = std::make_unique<torch::optim::AdamW>(
      parameter_groups(model->parameters(), settings.learning_rate), options);
  training.clip_grad_norm_ = [model](double max_norm) {
    return lockstep::clip_grad_norm_(model->parameters(), max_norm);
  };
  return training;
}

/// Goes on from the prompt, one character after the other.
std::string write(Gpt& gpt, const Training& training, const TextVocabulary& vocabulary,
                  const Settings& settings) {
  torch::NoGradGuard no_grad;
  gpt.eval();
  torch::manual_seed(settings.seed);  // ranks that write together draw the same characters
  const auto device = gpt.parameters().front().device();
  auto text = vocabulary.encode(settings.prompt).unsqueeze(0).to(device);
  for (int64_t written = 0; written < settings.sample; ++written) {
    const auto recent = text.slice(1, std::max<int64_t>(0, text.size(1) - settings.block_size));
    const auto scores = training.score_next(recent) / settings.temperature;
    text = torch::cat({text, torch::multinomial(scores.softmax(-1), 1)}, 1);
  }
  gpt.train();
  return vocabulary.decode(text.squeeze(0).cpu());
}

void train(const Settings& settings) {
  const auto device = use_device(settings.device);  // first of all
  auto world = lockstep::init_process_group();
  const bool is_pipeline = settings.strategy == "pipeline";
  const int64_t shares = is_pipeline ? 1 : world.size();  // of a batch
  TORCH_CHECK(settings.batch_size % shares == 0, "--batch-size ", settings.batch_size,
              " is for the whole job and must be a multiple of its ", world.size(), " ranks");
  TORCH_CHECK(!is_pipeline || settings.batch_size % settings.micro_batches == 0, "--batch-size ",
              settings.batch_size, " must be a multiple of --micro-batches ", settings.micro_batches);
  TORCH_CHECK(!is_pipeline || settings.layers >= world.size(), "--layers ", settings.layers,
              " can't be shared out over ", world.size(), " ranks");
  TORCH_CHECK(settings.width % settings.heads == 0, "--width ", settings.width,
              " must be a multiple of --heads ", settings.heads);
  TORCH_CHECK(settings.warm_up < settings.steps, "--warm-up ", settings.warm_up,
              " must be less than --steps ", settings.steps);

  TORCH_CHECK(!settings.prompt.empty(), "--prompt is empty; the sample needs a character to follow");

  lockstep::data::TextDatasetOptions options{.block_size = settings.block_size,
                                             .stride = settings.block_size};
  if (settings.bytes) options.vocabulary = TextVocabulary::bytes();
  const TextDataset text(settings.data, options);
  const TextVocabulary& vocabulary = text.vocabulary();
  vocabulary.encode(settings.prompt);  // an unknown character had better be found now
  lockstep::data::DistributedSamplerOptions sampling{.seed = settings.seed, .drop_last = true};
  if (is_pipeline) sampling.num_replicas = 1, sampling.rank = 0;
  lockstep::data::DistributedSampler sampler(text.size(), sampling);
  lockstep::data::DataLoader host_loader(text, {.batch_size = settings.batch_size / shares,
                                                .sampler = &sampler,
                                                .num_workers = 1,
                                                .drop_last = true,
                                                .pin_memory = device.is_cuda()});
  lockstep::data::DeviceLoader loader(host_loader, device);
  TORCH_CHECK(loader.size() > 0, "the text's ", text.size(), " blocks don't fill one batch of ",
              settings.batch_size, "; give a smaller --batch-size or --block-size");

  const Part part = is_pipeline ? Part{world.rank(), world.size()} : Part{};
  torch::manual_seed(settings.seed + part.index);  // layers of different stages begin with different values
  auto gpt = std::make_shared<Gpt>(vocabulary.size(), settings, part);
  gpt->to(device);
  const Training training = make_training(gpt, vocabulary.size(), settings);
  torch::optim::Optimizer& optimizer = *training.optimizer;
  auto warm_up = std::make_shared<lr::LinearLR>(optimizer, /*start_factor=*/0.01, /*end_factor=*/1.0,
                                                /*total_iters=*/settings.warm_up);
  auto cosine =
      std::make_shared<lr::CosineAnnealingLR>(optimizer, /*T_max=*/settings.steps - settings.warm_up,
                                              /*eta_min=*/settings.learning_rate / 10);
  lr::SequentialLR schedule(optimizer, {warm_up, cosine}, /*milestones=*/{settings.warm_up});

  auto numbers = torch::zeros({1}, torch::kLong);
  for (const auto& parameter : gpt->parameters()) numbers += parameter.numel();
  if (is_pipeline) lockstep::all_reduce(numbers);
  if (world.rank() == 0) {
    std::printf("%lld characters of text, %lld different ones, %lld parameters\n",
                static_cast<long long>(text.tokens().numel()), static_cast<long long>(vocabulary.size()),
                static_cast<long long>(numbers.item<int64_t>()));
  }
  const int64_t report_every = std::max<int64_t>(1, settings.steps / 10);
  auto losses = torch::zeros({1}, device);  // since the last report, this rank's
  double loss_of_all = 0;
  auto start = std::chrono::steady_clock::now();
  int64_t step = 0;
  for (int64_t epoch = 0; step < settings.steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      if (step == settings.steps) break;
      optimizer.zero_grad();
      losses += training.compute_gradients(batch);
      const auto norm = training.clip_grad_norm_(settings.max_norm);
      const double learning_rate = schedule.get_last_lr()[0];
      optimizer.step();
      schedule.step();
      if (++step % report_every != 0 && step != settings.steps) continue;

      const int64_t steps = (step - 1) % report_every + 1;
      lockstep::all_reduce(losses);
      loss_of_all = losses.item<double>() / static_cast<double>(steps * shares);
      losses.zero_();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      start = std::chrono::steady_clock::now();
      if (world.rank() != 0) continue;
      std::printf("step %lld/%lld: loss %.4f, gradient norm %.3f, learning rate %.6f, %.0f characters/s\n",
                  static_cast<long long>(step), static_cast<long long>(settings.steps), loss_of_all,
                  norm.item<double>(), learning_rate,
                  static_cast<double>(steps * settings.batch_size * settings.block_size) / seconds);
      std::fflush(stdout);
    }
  }
  if (world.rank() != 0 && !training.all_ranks_score) return;
  const std::string sample = write(*gpt, training, vocabulary, settings);
  if (world.rank() == 0) std::printf("loss: %.4f\nsample:\n%s\n", loss_of_all, sample.c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a small GPT on a text, and prints its loss and what it writes. Start it with: lockstep run "
      "--nproc-per-node N char_gpt --data FILE …\nA text: apt install bible-kjv, then bible gen1:1-rev22:21 "
      "> kjv.txt; any other in UTF-8 does, plain or gzip.");
  app.option_defaults()->take_last();
  const auto positive = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->check(CLI::PositiveNumber)->capture_default_str();
  };
  app.add_option("--data", settings.data, "the text")->required();
  app.add_flag("--bytes", settings.bytes, "learn bytes instead of characters: then the file may be anything");
  positive("--block-size", settings.block_size, "characters that the model sees at once");
  positive("--layers", settings.layers, "blocks of the model");
  positive("--heads", settings.heads, "of the attention; they share the width");
  positive("--width", settings.width, "numbers for each character");
  positive("--batch-size", settings.batch_size, "blocks of text in a step, all ranks together");
  positive("--steps", settings.steps, "of the optimizer");
  app.add_option("--warm-up", settings.warm_up, "steps in which the learning rate rises")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  positive("--learning-rate", settings.learning_rate, "AdamW's highest, after the warm-up");
  positive("--max-norm", settings.max_norm, "longer gradients are clipped to it");
  app.add_option("--sample", settings.sample, "characters to write at the end")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--prompt", settings.prompt, "what they follow; a line's end unless told");
  positive("--temperature", settings.temperature, "below 1: what is likely becomes more so");
  app.add_option("--seed", settings.seed, "of the weights, the shuffle and the sample")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--strategy", settings.strategy,
                 "ddp: a model for each rank; fsdp: one on each host, or over its devices "
                 "(FullyShardedDataParallel); "
                 "pipeline: a part of the layers on each rank")
      ->check(CLI::IsMember({"ddp", "fsdp", "pipeline"}))
      ->capture_default_str();
  positive("--micro-batches", settings.micro_batches, "parts in which a batch goes through a pipeline");
  add_device_option(app, settings.device);
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "char_gpt: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "char_gpt: " << error.what() << std::endl;
  return 1;
}

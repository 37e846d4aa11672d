#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <torch/torch.h>

/// The networks whose training steps are measured, by name, with the batches they are fed. Those of layers
/// alone are in benchmarks/peers/python_ddp_step.py, too, and the transformers in python_sharding.py.
namespace lockstep::benchmarks {

/// A network as DistributedDataParallel wraps it: one tensor in, logits of shape samples × classes out.
class Model : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;
};

/// Linear layers with ReLU between them.
class Mlp : public Model {
 public:
  explicit Mlp(const std::vector<int64_t>& widths) {
    for (size_t i = 1; i < widths.size(); ++i) {
      layers_.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(widths[i - 1], widths[i])));
    }
  }
  torch::Tensor forward(const torch::Tensor& input) override {
    torch::Tensor x = input;
    for (size_t i = 0; i + 1 < layers_.size(); ++i) x = torch::relu(layers_[i](x));
    return layers_.back()(x);
  }

 private:
  std::vector<torch::nn::Linear> layers_;
};

/// Two convolutions with batch normalisation and two linear layers, for images of 1×28×28.
class Cnn : public Model {
 public:
  Cnn()
      : layers_(convolution(1, 32), torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                convolution(32, 64), torch::nn::BatchNorm2d(64), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                torch::nn::Flatten(), torch::nn::Linear(64 * 7 * 7, 128), torch::nn::ReLU(),
                torch::nn::Linear(128, 10)) {
    register_module("layers", layers_);
  }
  torch::Tensor forward(const torch::Tensor& input) override { return layers_->forward(input); }

 private:
  static torch::nn::Conv2d convolution(int64_t in, int64_t out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
  }
  torch::nn::Sequential layers_;
};

/// Predicts a token at each place of a sequence: an embedding, encoder layers, a linear layer.
class Transformer : public Model {
 public:
  static constexpr int64_t kVocabulary = 2048;
  static constexpr int64_t kLength = 64;

  Transformer(int64_t width, int64_t layers)
      : embedding_(kVocabulary, width),
        encoder_(torch::nn::TransformerEncoderLayer(
                     torch::nn::TransformerEncoderLayerOptions(width, width / 64).dim_feedforward(4 * width)),
                 layers),
        head_(width, kVocabulary) {
    register_module("embedding", embedding_);
    register_module("encoder", encoder_);
    register_module("head", head_);
  }
  /// Tokens, samples × kLength.
  torch::Tensor forward(const torch::Tensor& input) override {
    const auto sequence_first = embedding_(input).transpose(0, 1);
    return head_(encoder_(sequence_first).transpose(0, 1)).flatten(0, 1);
  }

 private:
  torch::nn::Embedding embedding_;
  torch::nn::TransformerEncoder encoder_;
  torch::nn::Linear head_;
};

/// A layer that sleeps instead of computing: its output is its input, and its weight's gradient is a constant.
class SleepingLayer : public torch::autograd::Function<SleepingLayer> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& input,
                               const torch::Tensor& weight) {
    context->save_for_backward({weight});
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    std::this_thread::sleep_for(std::chrono::milliseconds(45));
    return {gradients[0], torch::full_like(context->get_saved_variables()[0], 1e-3)};
  }
};

/// Simulates a step of 480 ms of computation with 25 MiB of gradients on more ranks than there are cores: eight
/// layers of SleepingLayer.
class Sleeping : public Model {
 public:
  Sleeping() {
    for (int64_t i = 0; i < 8; ++i) {
      weights_.push_back(register_parameter("weight" + std::to_string(i), torch::zeros({kWeights})));
    }
  }
  torch::Tensor forward(const torch::Tensor& input) override {
    torch::Tensor x = input;
    for (const torch::Tensor& weight : weights_) x = SleepingLayer::apply(x, weight);
    return x;
  }

 private:
  static constexpr int64_t kWeights = (25 << 20) / 4 / 8;
  std::vector<torch::Tensor> weights_;
};

/// How a network is made and what a batch of it looks like.
struct Network {
  std::function<std::shared_ptr<Model>()> make;
  int64_t batch_size;
  std::vector<int64_t> input_sizes;        // of one sample
  int64_t tokens = 0;                      // inputs are tokens below it; 0: they are normally distributed
  std::vector<int64_t> target_sizes = {};  // of one sample
  int64_t classes = 10;
};

inline Network transformer(int64_t width, int64_t layers, int64_t batch_size) {
  return {.make = [=] { return std::make_shared<Transformer>(width, layers); },
          .batch_size = batch_size,
          .input_sizes = {Transformer::kLength},
          .tokens = Transformer::kVocabulary,
          .target_sizes = {Transformer::kLength},
          .classes = Transformer::kVocabulary};
}

inline Network mlp(std::vector<int64_t> widths, int64_t batch_size) {
  return {.make = [widths] { return std::make_shared<Mlp>(widths); },
          .batch_size = batch_size,
          .input_sizes = {widths.front()},
          .classes = widths.back()};
}

/// Throws c10::ValueError for a name that is none.
inline const Network& find_network(const std::string& name) {
  static const std::map<std::string, Network> networks = {
      {"small", mlp({784, 256, 10}, 64)},                                 // 0.2 million parameters
      {"large", mlp({1024, 2048, 2048, 10}, 128)},                        // 6.3 million, 24 MiB of gradients
      {"huge", mlp({4096, 4096, 4096, 4096, 4096, 4096, 4096, 10}, 32)},  // 101 million, 384 MiB
      {"cnn", {.make = [] { return std::make_shared<Cnn>(); }, .batch_size = 32, .input_sizes = {1, 28, 28}}},
      {"transformer", transformer(256, /*layers=*/2, 8)},      // 2.6 million
      {"transformer_25m", transformer(512, /*layers=*/7, 4)},  // 24 million
      {"sleeping",
       {.make = [] { return std::make_shared<Sleeping>(); }, .batch_size = 32, .input_sizes = {10}}}};
  const auto found = networks.find(name);
  if (found != networks.end()) return found->second;
  std::string known;
  for (const auto& [each, network] : networks) known += (known.empty() ? "" : ", ") + each;
  TORCH_CHECK_VALUE(false, "there is no network '", name, "'; there are ", known);
}

}  // namespace lockstep::benchmarks

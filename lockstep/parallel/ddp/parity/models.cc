#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/parallel/ddp/parity/models.h>

namespace parity {
namespace {

namespace nn = torch::nn;
using torch::Tensor;
using Outputs = std::vector<Tensor>;

constexpr int64_t kFeatures = 64;  // an image of 8×8
constexpr int64_t kClasses = 10;
constexpr int64_t kTokens = 6;  // a sequence
constexpr int64_t kVocabulary = 20;

struct Mlp : Net {
  Outputs forward(const Tensor& x, int64_t) override { return {fc3(torch::tanh(fc2(torch::tanh(fc1(x)))))}; }
  nn::Linear fc1 = register_module("fc1", nn::Linear(kFeatures, 24));
  nn::Linear fc2 = register_module("fc2", nn::Linear(24, 24));
  nn::Linear fc3 = register_module("fc3", nn::Linear(24, kClasses));
};

/// An LSTM over the rows of an image, and a parameter that is frozen.
struct Recurrent : Net {
  Outputs forward(const Tensor& x, int64_t) override {
    const auto rows = std::get<0>(lstm(x.view({-1, 8, 8})));
    return {fc(rows.select(1, -1) * scale)};
  }
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(8, 6).batch_first(true)));
  nn::Linear fc = register_module("fc", nn::Linear(6, kClasses));
  Tensor scale = register_parameter("scale", torch::full({6}, 1.5), /*requires_grad=*/false);
};

struct Cnn : Net {
  static nn::Conv2d convolution(int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
  }
  Outputs forward(const Tensor& x, int64_t) override {
    auto y = torch::tanh(bn1(conv1(x.view({-1, 1, 8, 8}))));
    y = torch::tanh(bn2(conv2(y)));
    return {fc(torch::avg_pool2d(y, 2).flatten(1))};
  }
  nn::Conv2d conv1 = register_module("conv1", convolution(1, 6));
  nn::BatchNorm2d bn1 = register_module("bn1", nn::BatchNorm2d(6));
  nn::Conv2d conv2 = register_module("conv2", convolution(6, 8));
  nn::BatchNorm2d bn2 = register_module("bn2", nn::BatchNorm2d(8));
  nn::Linear fc = register_module("fc", nn::Linear(8 * 4 * 4, kClasses));
};

/// One block; the output layer's weight is the embedding's, registered under both names.
struct Transformer : Net {
  static constexpr int64_t kWidth = 16;
  static constexpr int64_t kHeads = 2;

  Outputs forward(const Tensor& x, int64_t) override {
    auto y = embedding(x);
    const auto batch = x.size(0);
    const auto parts =
        qkv(norm1(y)).view({batch, kTokens, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const auto scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) / 4;
    const auto weights = torch::softmax(scores.masked_fill(future, -1e9), -1);
    y = y + out(torch::matmul(weights, parts[2]).transpose(1, 2).reshape({batch, kTokens, kWidth}));
    y = y + down(torch::gelu(up(norm2(y))));
    return {nn::functional::linear(y, tied).flatten(0, 1)};
  }
  static nn::LayerNorm norm() { return nn::LayerNorm(nn::LayerNormOptions({kWidth})); }

  nn::Embedding embedding = register_module("embedding", nn::Embedding(kVocabulary, kWidth));
  nn::LayerNorm norm1 = register_module("norm1", norm());
  nn::Linear qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::LayerNorm norm2 = register_module("norm2", norm());
  nn::Linear up = register_module("up", nn::Linear(kWidth, 2 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(2 * kWidth, kWidth));
  Tensor tied = register_parameter("tied", embedding->weight);
  Tensor future = register_buffer("future", torch::ones({kTokens, kTokens}, torch::kBool).triu(1));
};

/// Bits 1 and 2 of `branch` choose layers; bit 4 says whether the loss uses the second output.
struct Branches : Net {
  Outputs forward(const Tensor& x, int64_t branch) override {
    auto y = torch::tanh(trunk(x));
    if (branch & 1) y = y + torch::tanh(left(y));
    if (branch & 2) y = y + torch::tanh(right(y));
    return {head(y), auxiliary(y)};
  }
  nn::Linear trunk = register_module("trunk", nn::Linear(kFeatures, 16));
  nn::Linear left = register_module("left", nn::Linear(16, 16));
  nn::Linear right = register_module("right", nn::Linear(16, 16));
  nn::Linear never = register_module("never", nn::Linear(16, 16));
  nn::Linear auxiliary = register_module("auxiliary", nn::Linear(16, kClasses));
  nn::Linear head = register_module("head", nn::Linear(16, kClasses));
};

struct SparseEmbedding : Net {
  Outputs forward(const Tensor& x, int64_t) override { return {fc(torch::tanh(embedding(x))).flatten(0, 1)}; }
  nn::Embedding embedding =
      register_module("embedding", nn::Embedding(nn::EmbeddingOptions(kVocabulary, 8).sparse(true)));
  nn::Linear fc = register_module("fc", nn::Linear(8, kVocabulary));
};

/// torch.utils.checkpoint with use_reentrant=True, which LibTorch lacks: keeps no activations, computes them
/// again in backward, and runs a backward of their own.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);  // the model outlives the graph
    return layer->forward(x);                                         // gradients are off here
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    torch::AutoGradMode grad_mode(true);
    auto* layer = reinterpret_cast<nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({layer->forward(x)}, {gradients[0]});
    return {x.grad(), {}};
  }
};

/// `branch` times through one layer whose activations are computed again in backward.
struct Checkpointed : Net {
  Outputs forward(const Tensor& x, int64_t branch) override {
    auto y = torch::tanh(fc1(x));
    for (int64_t pass = 0; pass < branch; ++pass) y = torch::tanh(Checkpoint::apply(y, fc2.get()));
    return {fc3(y)};
  }
  nn::Linear fc1 = register_module("fc1", nn::Linear(kFeatures, 16));
  nn::Linear fc2 = register_module("fc2", nn::Linear(16, 16));
  nn::Linear fc3 = register_module("fc3", nn::Linear(16, kClasses));
};

}  // namespace

std::shared_ptr<Net> make_net(const std::string& model) {
  if (model == "recurrent") return std::make_shared<Recurrent>();
  if (model == "mlp") return std::make_shared<Mlp>();
  if (model == "cnn") return std::make_shared<Cnn>();
  if (model == "cnn sync") return lockstep::convert_sync_batchnorm(std::make_shared<Cnn>());
  if (model == "transformer") return std::make_shared<Transformer>();
  if (model == "branches") return std::make_shared<Branches>();
  if (model == "sparse") return std::make_shared<SparseEmbedding>();
  if (model == "checkpointed") return std::make_shared<Checkpointed>();
  TORCH_CHECK(false, "no model '", model, "'");
}

}  // namespace parity

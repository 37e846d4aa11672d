// Pipe on the CPU: the bits of the module on the micro-batches, for all cuts and sizes, and what it refuses.
#include <gmock/gmock.h>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/testing/pipe_fixtures.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::pipe_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::Calls;
using testing::copy_of;
using testing::equal;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::on_micro_batches;
using testing::random;
using torch::Tensor;

PipeOptions on_cpus(size_t partitions, int64_t chunks, PipeCheckpoint checkpoint = PipeCheckpoint::kNever) {
  return {.devices = std::vector<at::Device>(partitions, at::Device(at::kCPU)),
          .chunks = chunks,
          .checkpoint = checkpoint};
}

/// A random number of layers, random ones.
nn::Sequential random_net(std::mt19937& random_number, int64_t width, bool with_batch_norm) {
  nn::Sequential net;
  const auto layers = 1 + random_number() % 8;
  for (size_t i = 0; i < layers; ++i) {
    switch (random_number() % 6) {
      case 0:
        net->push_back(nn::Tanh());
        break;
      case 1:
        net->push_back(nn::LayerNorm(nn::LayerNormOptions({width})));
        break;
      case 2:
        if (with_batch_norm) {
          net->push_back(nn::BatchNorm1d(width));
          break;
        }
        [[fallthrough]];
      case 3:
        net->push_back(nn::Linear(width, width));
        if (random_number() % 2 == 0) net->push_back(nn::ReLU(nn::ReLUOptions(true)));
        break;
      default:
        net->push_back(nn::Linear(width, width));
    }
  }
  net->to(at::kDouble);
  return net;
}

std::vector<int64_t> random_balance(std::mt19937& random_number, size_t layers) {
  std::vector<int64_t> balance{1};
  for (size_t i = 1; i < layers; ++i) {
    if (random_number() % 2 == 0) balance.push_back(0);
    ++balance.back();
  }
  return balance;
}

TEST(Pipe, ComputesTheBitsOfTheModuleOnTheMicroBatches) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random_number(seed);
    torch::manual_seed(seed);
    const int64_t batch = 1 + random_number() % 9, chunks = 1 + random_number() % 6,
                  width = 1 + random_number() % 5;
    const auto last_chunk = torch::zeros({batch}).chunk(chunks).back().size(0);
    const auto checkpoint = static_cast<PipeCheckpoint>(random_number() % 3);
    // BatchNorm takes no single row; and computed again, it counts a micro-batch twice.
    const auto alone =
        random_net(random_number, width, last_chunk > 1 && checkpoint == PipeCheckpoint::kNever);
    const auto net = copy_of(alone);
    const auto balance = random_balance(random_number, net->size());
    const bool input_needs_gradient = random_number() % 2 == 0;
    for (auto& parameter : net->parameters()) {
      if (random_number() % 8 == 0) parameter.requires_grad_(false);
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      alone->parameters()[i].requires_grad_(net->parameters()[i].requires_grad());
    }
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", balance " << at::IntArrayRef(balance)
                                      << ", chunks " << chunks << ", batch " << batch);
    Pipe pipe(net, balance, on_cpus(balance.size(), chunks, checkpoint));
    for (int step = 0; step < 2; ++step) {  // the second adds to the gradients of the first
      auto x = random({batch, width}, seed + step).requires_grad_(input_needs_gradient),
           y = x.detach().clone();
      y.requires_grad_(input_needs_gradient);
      // They get copies, for the first layer may work in place.
      const auto actual = pipe(x * 1), expected = on_micro_batches(alone, y * 1, chunks);
      ASSERT_TRUE(torch::equal(actual, expected));
      ASSERT_EQ(actual.requires_grad(), expected.requires_grad());
      if (!expected.requires_grad()) continue;
      loss_of(actual).backward();
      loss_of(expected).backward();
      ASSERT_TRUE(equal(gradients_of(*net), gradients_of(*alone)));
      ASSERT_TRUE(equal({x.grad()}, {y.grad()}));
      ASSERT_TRUE(equal(net->buffers(), alone->buffers()));
    }
  }
}

TEST(Pipe, AddsTheGradientsOfSharedParameters) {
  const auto compare = [](const std::vector<int64_t>& balance) {
    const auto make = [] {
      torch::manual_seed(1);
      const nn::Linear shared(4, 4), own(4, 4);
      nn::Sequential net(shared, nn::Tanh(), shared, own, shared);
      net->to(at::kDouble);
      return net;
    };
    auto net = make(), alone = make();
    Pipe pipe(net, balance, on_cpus(balance.size(), 3));
    EXPECT_EQ(pipe.named_parameters().keys(), net->named_parameters().keys());
    loss_of(pipe(random({7, 4}))).backward();
    loss_of(on_micro_batches(alone, random({7, 4}), 3)).backward();
    return std::pair(gradients_of(*net), gradients_of(*alone));
  };
  for (const auto& balance : std::vector<std::vector<int64_t>>{{5}, {2, 1, 2}, {1, 1, 1, 1, 1}}) {
    const auto [actual, expected] = compare(balance);
    EXPECT_TRUE(equal(actual, expected)) << at::IntArrayRef(balance);
  }
  const auto [actual, expected] = compare({3, 2});  // twice in one, once in the other: rounded otherwise
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-12));
}

/// Two tensors and a number in, a pair out.
struct MixImpl : nn::Cloneable<MixImpl> {
  MixImpl() { reset(); }
  void reset() override { linear = register_module("linear", nn::Linear(3, 4)); }
  std::pair<Tensor, Tensor> forward(const Tensor& x, const Tensor& indices, int64_t times) {
    return {linear(x) * times, indices + 1};
  }
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Mix);

/// A pair in, a tuple out, of which the last tensor is the first.
struct PickImpl : nn::Cloneable<PickImpl> {
  PickImpl() { reset(); }
  void reset() override { embedding = register_module("embedding", nn::Embedding(9, 4)); }
  std::tuple<Tensor, Tensor, Tensor> forward(const std::pair<Tensor, Tensor>& both) {
    const auto sum = both.first + embedding(both.second);
    return {sum, both.second, sum};
  }
  nn::Embedding embedding{nullptr};
};
TORCH_MODULE(Pick);

struct EndImpl : nn::Module {
  std::vector<Tensor> forward(const std::tuple<Tensor, Tensor, Tensor>& all) {
    return {std::get<0>(all) * std::get<2>(all), std::get<1>(all)};
  }
};
TORCH_MODULE(End);

TEST(Pipe, PassesTensorsInPairsTuplesAndVectors) {
  const auto make = [] {
    torch::manual_seed(2);
    nn::Sequential net{Mix(), Pick(), End()};
    net->to(at::kDouble);
    return net;
  };
  auto net = make(), alone = make();
  const auto x = random({5, 3}), indices = torch::arange(5);
  for (const auto checkpoint : {PipeCheckpoint::kNever, PipeCheckpoint::kAlways}) {
    Pipe pipe(net, {1, 1, 1}, on_cpus(3, 2, checkpoint));
    net->zero_grad();
    alone->zero_grad();
    const auto actual = pipe.forward<std::vector<Tensor>>(x, indices, int64_t{3});
    std::vector<std::vector<Tensor>> parts;
    for (int64_t begin : {0, 3}) {
      const int64_t size = begin == 0 ? 3 : 2;
      parts.push_back(alone->forward<std::vector<Tensor>>(x.narrow(0, begin, size),
                                                          indices.narrow(0, begin, size), int64_t{3}));
    }
    const auto expected = torch::cat({parts[0][0], parts[1][0]});
    EXPECT_TRUE(torch::equal(actual[0], expected));
    EXPECT_TRUE(torch::equal(actual[1], indices + 1));
    EXPECT_FALSE(actual[1].requires_grad());
    loss_of(actual[0]).backward();
    loss_of(expected).backward();
    EXPECT_TRUE(equal(gradients_of(*net), gradients_of(*alone)));
  }
  Pipe pipe(net, {1, 2}, on_cpus(2, 2));
  EXPECT_THAT(message_of<c10::Error>([&] { pipe(x, indices, int64_t{3}); }),
              HasSubstr("but you asked for type at::Tensor"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { pipe(x, torch::arange(4), int64_t{3}); }),
              HasSubstr("one has the shape [5, 3] and one [4]"));
}

/// The output of an LSTM over its batch.
struct FirstOfLstmImpl : nn::Module {
  Tensor forward(const std::tuple<Tensor, std::tuple<Tensor, Tensor>>& output) { return std::get<0>(output); }
};
TORCH_MODULE(FirstOfLstm);

TEST(Pipe, PassesWhatLstmReturns) {
  torch::manual_seed(3);
  nn::Sequential net{nn::LSTM(nn::LSTMOptions(3, 4).batch_first(true)), FirstOfLstm()};
  Pipe pipe(net, {1, 1}, on_cpus(2, 2));
  const auto x = random({4, 5, 3}, 0, at::kFloat);
  EXPECT_TRUE(torch::equal(pipe(x), on_micro_batches(net, x, 2)));
}

struct StringsImpl : nn::Module {
  std::string forward(const Tensor&) { return "text"; }
};
TORCH_MODULE(Strings);

TEST(Pipe, SaysWhatCannotGoBetweenPartitions) {
  nn::Sequential net{Strings(), nn::Tanh()};
  Pipe pipe(net, {1, 1}, on_cpus(2, 2));
  EXPECT_THAT(
      message_of<c10::TypeError>([&] {
        pipe(random({4, 2}));
      }),
      AllOf(HasSubstr("string"), HasSubstr("in partition 0 (layers 0 to 0) on cpu, micro-batch 0 of 2")));
}

TEST(Pipe, NamesBothFaultsOfABalanceInOneError) {
  const auto text = [](const std::vector<int64_t>& balance, size_t devices) {
    nn::Sequential net{nn::Linear(8, 8), nn::ReLU(), nn::Linear(8, 8), nn::ReLU(),
                       nn::Linear(8, 8), nn::ReLU(), nn::Linear(8, 8)};
    return message_of<c10::ValueError>([&] { Pipe pipe(net, balance, on_cpus(devices, 8)); });
  };
  EXPECT_THAT(
      text({2, 2, 2}, 2),
      HasSubstr(
          "Pipe: the balance [2, 2, 2] adds up to 6, but the module has 7 layers; and it makes 3 partitions, "
          "but there are 2 devices."));
  EXPECT_THAT(text({2, 2, 2}, 2), AllOf(HasSubstr("[4, 3]"), HasSubstr("would go on 2 devices")));
  EXPECT_THAT(text({2, 2, 2}, 3),
              AllOf(HasSubstr("adds up to 6"), ::testing::Not(HasSubstr("partitions, but"))));
  EXPECT_THAT(text({4, 3}, 1), AllOf(HasSubstr("there is 1 device"), ::testing::Not(HasSubstr("adds up"))));
  EXPECT_THAT(text({8, -1}, 2), HasSubstr("has a number below 1"));
  EXPECT_THAT(text({}, 2), HasSubstr("adds up to 0"));
  EXPECT_THAT(text({}, 0), HasSubstr("adds up to 0")) << "and no device is named";
}

TEST(Pipe, RefusesWhatItCannotCut) {
  nn::Sequential net{nn::Linear(2, 2), nn::BatchNorm1d(2)}, none(nullptr), empty;
  EXPECT_THAT(message_of<c10::ValueError>([&] { Pipe pipe(none, {1}); }), HasSubstr("no layers"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { Pipe pipe(empty, {1}); }), HasSubstr("no layers"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                Pipe pipe(net, {1, 1}, on_cpus(2, 0));
              }),
              HasSubstr("chunks is 0"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                Pipe pipe(net, {2}, {.devices = {at::Device(at::kCPU), at::Device(at::kCUDA, 0)}});
              }),
              HasSubstr("devices holds cpu and cuda:0"));
  const nn::BatchNorm1d norm(2);
  nn::Sequential twice{norm, nn::Linear(2, 2), norm};
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                Pipe pipe(twice, {1, 2}, on_cpus(2, 2));
              }),
              HasSubstr("a buffer of shape [2] is in partition 0 (layers 0 to 0) on cpu and in partition 1"));
  Pipe pipe(net, {1, 1}, on_cpus(2, 2));
  EXPECT_THAT(message_of<c10::ValueError>([&] { pipe(torch::tensor(1.0)); }), HasSubstr("no dimensions"));
}

TEST(Pipe, HasTheNamesAndStatesOfTheSequential) {
  nn::Sequential net({{"first", nn::Linear(3, 4)}, {"norm", nn::BatchNorm1d(4)}, {"last", nn::Linear(4, 2)}});
  auto pipe = std::make_shared<Pipe>(net, std::vector<int64_t>{1, 2}, on_cpus(2, 2));
  EXPECT_EQ(pipe->named_parameters().keys(), net->named_parameters().keys());
  EXPECT_EQ(pipe->named_buffers().keys(), net->named_buffers().keys());
  pipe->eval();
  EXPECT_FALSE(net[1]->is_training());
  std::stringstream file;
  torch::save(pipe, file);
  nn::Sequential other(
      {{"first", nn::Linear(3, 4)}, {"norm", nn::BatchNorm1d(4)}, {"last", nn::Linear(4, 2)}});
  torch::load(other, file);
  EXPECT_TRUE(equal(other->parameters(), net->parameters()));
}

TEST(Pipe, WorksWithoutGradients) {
  nn::Sequential net{nn::Linear(3, 4), nn::Dropout(0.5), nn::Linear(4, 2)};
  Pipe pipe(net, {1, 2}, on_cpus(2, 4));
  pipe.eval();
  const torch::NoGradGuard no_grad;
  const auto x = random({9, 3}, 0, at::kFloat), y = pipe(x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(torch::equal(y, on_micro_batches(net, x, 4)));
  EXPECT_EQ(pipe(torch::zeros({0, 3})).sizes(), at::IntArrayRef({0, 2}));
}

TEST(Pipe, SaysWhereALayerHasFailedAndGoesOn) {
  bool fails = true;
  nn::Sequential net{nn::Linear(3, 3), nn::Tanh(), Calls([&](int call) {
                       if (fails && call == 1) throw std::runtime_error("a layer of mine");
                     }),
                     nn::Linear(3, 2)};
  Pipe pipe(net, {2, 2}, on_cpus(2, 3));
  const auto x = random({6, 3}, 0, at::kFloat);
  EXPECT_THAT(message_of<c10::Error>([&] { pipe(x); }),
              AllOf(HasSubstr("a layer of mine"),
                    HasSubstr("in partition 1 (layers 2 to 3) on cpu, micro-batch 1 of 3")));
  fails = false;
  EXPECT_EQ(pipe(x).size(0), 6);
  EXPECT_THAT(
      message_of<c10::Error>([&] {
        pipe(random({6, 4}, 0, at::kFloat));
      }),
      AllOf(HasSubstr("shapes cannot be multiplied"), HasSubstr("in partition 0 (layers 0 to 1) on cpu")));
}

TEST(Pipe, ComputesActivationsAgainAsToldByCheckpoint) {
  const auto calls_of = [](PipeCheckpoint checkpoint, bool with_gradients) {
    Calls calls([](int) {});
    nn::Sequential net{nn::Linear(3, 3), calls, nn::Tanh(), nn::Linear(3, 3), nn::Tanh()};
    Pipe pipe(net, {3, 2}, on_cpus(2, 4, checkpoint));
    const c10::AutoGradMode mode(with_gradients);
    const auto y = pipe(random({8, 3}, 0, at::kFloat));
    if (with_gradients) y.sum().backward();
    return calls->calls;
  };
  EXPECT_EQ(calls_of(PipeCheckpoint::kNever, true), 4);
  EXPECT_EQ(calls_of(PipeCheckpoint::kExceptLast, true), 7);
  EXPECT_EQ(calls_of(PipeCheckpoint::kAlways, true), 8);
  EXPECT_EQ(calls_of(PipeCheckpoint::kAlways, false), 4);
}

TEST(Pipe, RefusesToComputeRandomActivationsAgainInThreads) {
  nn::Sequential net{nn::Linear(3, 3), nn::Dropout(0.5), nn::Linear(3, 3)};
  Pipe two(net, {1, 2}, on_cpus(2, 2, PipeCheckpoint::kAlways));
  const auto x = random({8, 3}, 0, at::kFloat);
  EXPECT_THAT(message_of<c10::Error>([&] { two(x); }), HasSubstr("set checkpoint to kNever"));
  two.eval();
  EXPECT_EQ(two(x).size(0), 8);
  two.train();
  const auto gradients = [&](PipeCheckpoint checkpoint) {
    Pipe one(net, {3}, on_cpus(1, 2, checkpoint));
    net->zero_grad();
    torch::manual_seed(5);
    loss_of(one(x)).backward();
    return testing::copies(gradients_of(*net));
  };
  EXPECT_TRUE(equal(gradients(PipeCheckpoint::kAlways), gradients(PipeCheckpoint::kNever)));
}

/// bfloat16 on the CPU, in the calling thread.
class Bfloat16 {
 public:
  Bfloat16() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  Bfloat16(const Bfloat16&) = delete;
  Bfloat16& operator=(const Bfloat16&) = delete;
  ~Bfloat16() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(Pipe, ComputesInTheCallersAutocast) {
  torch::manual_seed(7);
  nn::Sequential alone{nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 4)};
  auto net = copy_of(alone);
  const auto x = random({9, 8}, 0, at::kFloat);
  for (const auto checkpoint : {PipeCheckpoint::kNever, PipeCheckpoint::kAlways}) {
    Pipe pipe(net, {2, 3}, on_cpus(2, 3, checkpoint));
    net->zero_grad();
    alone->zero_grad();
    Tensor actual, expected;
    {
      const Bfloat16 autocast;
      actual = pipe(x);
      expected = on_micro_batches(alone, x, 3);
    }
    EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(torch::equal(actual, expected));
    loss_of(actual.to(at::kFloat)).backward();
    loss_of(expected.to(at::kFloat)).backward();
    const auto gradients = gradients_of(*net), expected_gradients = gradients_of(*alone);
    for (size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(torch::allclose(gradients[i], expected_gradients[i], 2e-2, 2e-2)) << i;
    }
  }
}

}  // namespace
}  // namespace lockstep::pipe_test

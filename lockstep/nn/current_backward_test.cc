#include <gmock/gmock.h>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <lockstep/nn/current_backward.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::current_backward_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

void fail(const torch::Tensor& /*gradient*/) {
  TORCH_CHECK(false, "no such word: xyzzy");
}

TEST(CurrentBackward, AnExceptionThatEndsItIsHeard) {
  const auto x = torch::ones({2}, torch::requires_grad());
  std::vector<std::string> heard;
  const auto listened = [&] {
    const auto y = 2 * x;
    y.register_hook([&](const torch::Tensor&) {
      on_failed_backward([&](const std::string& text) { heard.push_back(text); });
    });
    return y;
  };
  listened().sum().backward();
  EXPECT_THAT(heard, IsEmpty());

  const auto before_it = listened() * 1;
  before_it.register_hook(fail);
  message_of<c10::Error>([&] { before_it.sum().backward(); });
  EXPECT_THAT(heard, IsEmpty());

  const auto at_its_end = listened();
  at_its_end.register_hook([](const torch::Tensor& gradient) {
    torch::autograd::Engine::get_default_engine().queue_callback([gradient] { fail(gradient); });
  });
  message_of<c10::Error>([&] { at_its_end.sum().backward(); });
  EXPECT_THAT(std::exchange(heard, {}), ElementsAre(HasSubstr("xyzzy")));

  x.register_hook(fail);
  message_of<c10::Error>([&] { listened().sum().backward(); });
  EXPECT_THAT(heard, ElementsAre(HasSubstr("xyzzy")));
}

}  // namespace
}  // namespace lockstep::current_backward_test

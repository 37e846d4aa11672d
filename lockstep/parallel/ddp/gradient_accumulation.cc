#include <algorithm>
#include <cmath>

#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <lockstep/parallel/ddp/gradient_accumulation.h>

namespace lockstep {
namespace {

int64_t divide_up(int64_t number, int64_t by) {
  return (number + by - 1) / by;
}

}  // namespace

GradientAccumulation::GradientAccumulation(GradientAccumulationOptions options) : options_(options) {
  TORCH_CHECK_VALUE(options_.steps >= 1, "GradientAccumulation: steps is ", options_.steps,
                    "; it must be at least 1");
  TORCH_CHECK_VALUE(options_.samples.has_value() == options_.batch_size.has_value(),
                    "GradientAccumulation: give both of samples and batch_size, or neither");
  TORCH_CHECK_VALUE(!options_.samples || !options_.micro_batches,
                    "GradientAccumulation: give micro_batches, or samples and batch_size, not all of them");
  TORCH_CHECK_VALUE(options_.micro_batches.value_or(0) >= 0, "GradientAccumulation: micro_batches is ",
                    options_.micro_batches.value_or(0), "; it must not be negative");
  if (options_.samples) {
    TORCH_CHECK_VALUE(*options_.samples >= 0, "GradientAccumulation: samples is ", *options_.samples,
                      "; it must not be negative");
    TORCH_CHECK_VALUE(*options_.batch_size >= 1, "GradientAccumulation: batch_size is ", *options_.batch_size,
                      "; it must be at least 1");
    options_.micro_batches = divide_up(*options_.samples, *options_.batch_size);
  }
}

std::optional<int64_t> GradientAccumulation::groups() const {
  if (!options_.micro_batches) return std::nullopt;
  return divide_up(*options_.micro_batches, options_.steps);
}

/// Of the group that the next micro-batch is in.
int64_t GradientAccumulation::group_size() const {
  if (!options_.micro_batches) return options_.steps;
  const int64_t first = done_ / options_.steps * options_.steps;
  return std::min(options_.steps, *options_.micro_batches - first);
}

/// The next micro-batch's share of its group.
double GradientAccumulation::share() const {
  if (!options_.samples) return 1.0 / static_cast<double>(group_size());
  const int64_t batch = *options_.batch_size;
  const int64_t first = done_ / options_.steps * options_.steps;
  const int64_t own = std::min(batch, *options_.samples - done_ * batch);
  const int64_t all = std::min(options_.steps * batch, *options_.samples - first * batch);
  return static_cast<double>(own) / static_cast<double>(all);
}

GradientAccumulation::MicroBatch GradientAccumulation::begin(double share) {
  TORCH_CHECK(!options_.micro_batches || done_ < *options_.micro_batches, "GradientAccumulation: all ",
              options_.micro_batches.value_or(0),
              " micro-batches of the epoch are done; call reset() before the next epoch, or correct the "
              "number in the options");
  TORCH_CHECK(phase_ != Phase::kWithin,
              "GradientAccumulation: next() while the micro-batch before is alive; let it end first, at the "
              "end of the loop's body");
  TORCH_CHECK(phase_ != Phase::kIncomplete, "GradientAccumulation: micro-batch ", done_ - 1,
              " of this epoch ended without backward(), so its gradients are missing in its group; drop what "
              "there is by zero_grad(), and call reset()");
  return MicroBatch(*this, done_ % options_.steps, group_size(), share);
}

GradientAccumulation::MicroBatch GradientAccumulation::next() {
  return begin(share());
}

GradientAccumulation::MicroBatch GradientAccumulation::next(double samples, double of) {
  TORCH_CHECK_VALUE(std::isfinite(samples) && samples >= 0 && std::isfinite(of) && of > 0,
                    "GradientAccumulation: ", samples, " samples of ", of,
                    "; the first must not be negative, and the second must be more than 0");
  return begin(samples / of);
}

void GradientAccumulation::reset() {
  TORCH_CHECK(phase_ != Phase::kWithin,
              "GradientAccumulation: reset() while a micro-batch is alive; let it end first");
  done_ = 0;
  phase_ = Phase::kReady;
}

GradientAccumulation::MicroBatch::MicroBatch(GradientAccumulation& owner, int64_t index, int64_t group_size,
                                             double share)
    : owner_(owner),
      index_(index),
      group_size_(group_size),
      share_(share),
      first_sequence_(at::sequence_number::peek()) {
  if (!is_last() && owner_.make_no_sync_) no_sync_ = owner_.make_no_sync_();
  owner_.phase_ = Phase::kWithin;
  ++owner_.done_;
}

GradientAccumulation::MicroBatch::~MicroBatch() {
  owner_.phase_ = scaled_ ? Phase::kReady : Phase::kIncomplete;
}

at::Tensor GradientAccumulation::MicroBatch::scale(const at::Tensor& loss) {
  TORCH_CHECK(!scaled_,
              "GradientAccumulation: a second backward() or scale() of one micro-batch; add up its losses, "
              "and call it once");
  TORCH_CHECK_VALUE(loss.defined() && loss.requires_grad(),
                    "GradientAccumulation: the loss does not require a gradient; compute it from the model's "
                    "output, with gradients enabled");
  // A leaf has no history; the sequence numbers of other nodes grow.
  TORCH_CHECK(
      !loss.grad_fn() || loss.grad_fn()->sequence_nr() >= first_sequence_,
      "GradientAccumulation: the loss was computed before next(), so its forward did not know whether "
      "to synchronise; call the model between next() and the micro-batch's backward()");
  at::Tensor scaled = share_ == 1 ? loss : loss.mul(share_);
  scaled_ = true;
  return scaled;
}

void GradientAccumulation::MicroBatch::backward(const at::Tensor& loss) {
  const at::Tensor scaled = scale(loss);
  scaled_ = false;  // until it went well
  scaled.backward();
  scaled_ = true;
}

}  // namespace lockstep

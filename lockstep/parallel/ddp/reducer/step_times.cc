#include <algorithm>

#include <lockstep/parallel/ddp/reducer/step_times.h>

namespace lockstep {
namespace {

constexpr int64_t StepTimes::*kTimes[] = {&StepTimes::forward_compute, &StepTimes::backward_compute,
                                          &StepTimes::backward_comm,   &StepTimes::overlap,
                                          &StepTimes::exposed,         &StepTimes::reducing};
constexpr size_t StepTimes::*kBytes[] = {&StepTimes::bytes, &StepTimes::bytes_in_place};

}  // namespace

void StepClock::begin_forward() {
  reset();
  forward_ = Clock::now();
}

void StepClock::begin_backward() {
  if (backward_) return;
  backward_ = Clock::now();
  gradient_ = *backward_;
}

void StepClock::launch() {
  if (!launch_) launch_ = Clock::now();
}

void StepClock::gradient(size_t bytes, bool in_place) {
  begin_backward();
  gradient_ = Clock::now();
  bytes_ += bytes;
  if (in_place) bytes_in_place_ += bytes;
}

std::chrono::nanoseconds StepClock::since_backward() const {
  return backward_ ? gradient_ - *backward_ : Clock::duration::zero();
}

void StepClock::finish(int64_t iteration, std::chrono::nanoseconds reducing) {
  constexpr int64_t kAlwaysSampled = 10;
  if (iteration >= kAlwaysSampled && iteration % sample_rate_ != 0) return reset();
  const auto end = Clock::now();
  const auto between = [](Clock::time_point from, Clock::time_point to) {
    return std::max<int64_t>(0, std::chrono::nanoseconds(to - from).count());
  };
  const auto backward = backward_.value_or(end);
  const auto launch = launch_.value_or(end);
  last_ = {.forward_compute = between(forward_.value_or(backward), backward),
           .backward_compute = between(backward, gradient_),
           .backward_comm = between(launch, end),
           .overlap = between(launch, gradient_),
           .exposed = between(gradient_, end),
           .reducing = reducing.count(),
           .bytes = bytes_,
           .bytes_in_place = bytes_in_place_};
  if (++iterations_ > 1) {  // the first makes the buckets' order and learns where gradients come from
    ++averaged_;
    for (const auto time : kTimes) sum_.*time += last_.*time;
    for (const auto bytes : kBytes) sum_.*bytes += last_.*bytes;
  }
  reset();
}

void StepClock::reset() {
  forward_.reset();
  backward_.reset();
  launch_.reset();
  bytes_ = bytes_in_place_ = 0;
}

StepTimes StepClock::average() const {
  if (averaged_ == 0) return last_;
  StepTimes average = sum_;
  for (const auto time : kTimes) average.*time /= averaged_;
  for (const auto bytes : kBytes) average.*bytes /= averaged_;
  return average;
}

}  // namespace lockstep

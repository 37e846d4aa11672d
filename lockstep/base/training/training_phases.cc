#include <algorithm>
#include <thread>

#include <lockstep/base/monotonic_ns.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>

namespace lockstep {
namespace {

/// Of this process: which thread trains, and what it does.
class PhaseClock {
 public:
  void on_mark(StepMark mark, const void* source) {
    if (!is_owner() && static_cast<int>(mark) <= owners_mark_.load(std::memory_order_relaxed)) return;
    std::shared_ptr<const PhaseAudience> audience;
    std::optional<PhaseTimes> times;
    {
      const std::lock_guard lock(mutex_);
      const int64_t now = monotonic_ns();
      const TrainingPhase phase = mark == StepMark::kBatch ? TrainingPhase::kData : TrainingPhase::kForward;
      owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      owners_mark_.store(std::max(owners_mark_.load(std::memory_order_relaxed), static_cast<int>(mark)),
                         std::memory_order_relaxed);
      change(phase, now);
      if (!counter_.begins(mark, source)) return;
      if (steps_ > 0) times = window_.end_step(now);
      ++steps_;
      step_samples_ = samples_;
      step_began_ns_ = now;
      if (audience_) {
        audience_->board->set_step({steps_, samples_, now});
        if (times) audience_->board->set_times(*times);
        audience = audience_;
      }
    }
    if (times && audience && audience->on_window) audience->on_window(*times);
  }

  TrainingPhase enter(TrainingPhase phase, bool from_any_thread) {
    if (!from_any_thread && !is_owner()) return TrainingPhase::kNone;
    const std::lock_guard lock(mutex_);
    if (steps_ == 0 || phase == phase_) return phase_;
    return change(phase, monotonic_ns());
  }

  void count(int64_t samples) {
    if (!is_owner()) return;
    const std::lock_guard lock(mutex_);
    samples_ += static_cast<uint64_t>(samples);
    if (audience_) audience_->board->samples.store(samples_, std::memory_order_relaxed);
  }

  void set_action(uint64_t word) {
    const std::lock_guard lock(mutex_);
    action_ = word;
    if (audience_) audience_->board->action.store(action_, std::memory_order_relaxed);
  }

  void tell(int64_t step, double loss) {
    const std::lock_guard lock(mutex_);
    told_step_ = step;
    loss_ = loss;
    if (audience_) show_progress(*audience_->board);
  }

  void begin_telling(const std::shared_ptr<const PhaseAudience>& audience) {
    const std::lock_guard lock(mutex_);
    audience_ = audience;
    PhaseBoard& board = *audience_->board;
    board.set_step({steps_, step_samples_, step_began_ns_});
    show_progress(board);
    board.samples.store(samples_, std::memory_order_relaxed);
    board.action.store(action_, std::memory_order_relaxed);
    show(board);
  }

  void end_telling(const std::shared_ptr<const PhaseAudience>& audience) {
    std::shared_ptr<const PhaseAudience> last;
    const std::lock_guard lock(mutex_);
    if (audience_ == audience) audience_.swap(last);
  }

 private:
  bool is_owner() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  /// Returns what was before.
  TrainingPhase change(TrainingPhase phase, int64_t now) {
    if (steps_ > 0) window_.add(phase_, now - since_ns_);
    since_ns_ = now;
    const TrainingPhase before = std::exchange(phase_, phase);
    if (audience_) show(*audience_->board);
    return before;
  }

  void show_progress(PhaseBoard& board) const {
    board.loss.store(loss_, std::memory_order_relaxed);
    board.told_step.store(told_step_, std::memory_order_release);
  }

  void show(PhaseBoard& board) const {
    board.phase.store(static_cast<uint32_t>(phase_), std::memory_order_relaxed);
    board.since_ns.store(since_ns_, std::memory_order_relaxed);
  }

  std::atomic<std::thread::id> owner_{};
  std::atomic<int> owners_mark_{-1};  // the most telling it has made, as a StepMark
  std::mutex mutex_;                  // for all that follows
  StepCounter counter_;
  PhaseWindow window_;
  TrainingPhase phase_ = TrainingPhase::kNone;
  int64_t since_ns_ = 0;
  uint64_t steps_ = 0;
  uint64_t samples_ = 0;
  uint64_t action_ = 0;
  uint64_t step_samples_ = 0;  // when the newest step began
  int64_t step_began_ns_ = 0;
  int64_t told_step_ = -1;  // none
  double loss_ = 0;
  std::shared_ptr<const PhaseAudience> audience_;
};

/// A forked child trains by itself, if it does, and tells its parent's peers nothing.
PerProcess<PhaseClock> phase_clock;

/// By one thread at a time. Readers see an odd version, or one that has changed, where they may have read a mix.
template <class Write>
void write_whole(std::atomic<uint64_t>& version, Write&& write) {
  const uint64_t before = version.load(std::memory_order_relaxed);
  version.store(before + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  write();
  version.store(before + 2, std::memory_order_release);
}

/// False where the writer was stopped in the middle.
template <class Read>
bool read_whole(const std::atomic<uint64_t>& version, Read&& read) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t before = version.load(std::memory_order_acquire);
    read();
    std::atomic_thread_fence(std::memory_order_acquire);
    if (before % 2 == 0 && version.load(std::memory_order_relaxed) == before) return true;
  }
  return false;
}

template <class Values, class Get>
double median_of(const Values& values, Get&& get) {
  std::array<double, PhaseWindow::kSlots> numbers;
  std::transform(values.begin(), values.end(), numbers.begin(), get);
  const auto middle = numbers.begin() + numbers.size() / 2;
  std::nth_element(numbers.begin(), middle, numbers.end());
  return (*middle + *std::max_element(numbers.begin(), middle)) / 2;
}

}  // namespace

const char* to_string(TrainingPhase phase) {
  constexpr std::array<const char*, kTrainingPhases> kNames = {"",         "data",    "forward",
                                                               "backward", "waiting", "optimizer"};
  const auto index = static_cast<size_t>(phase);
  return index < kNames.size() ? kNames[index] : "";
}

bool StepCounter::begins(StepMark mark, const void* source) {
  if (mark_ && mark < *mark_) return false;
  if (mark_ == mark) {
    if (source != source_ && ++of_others_ <= kPatience) return false;
    source_ = source;
    of_others_ = 0;
    return true;
  }
  const bool first = !mark_;
  mark_ = mark;
  source_ = source;
  return first;  // else the step has begun already, at a mark that tells less
}

void mark_step(StepMark mark, const void* source) {
  phase_clock.get().on_mark(mark, source);
  if (auto* listener = step_mark_listener.load(std::memory_order_acquire)) listener(mark, source);
}

void enter_phase(TrainingPhase phase, bool from_any_thread) {
  phase_clock.get().enter(phase, from_any_thread);
}

void count_samples(int64_t samples) {
  phase_clock.get().count(samples);
}

WaitingPhase::WaitingPhase() : before_(phase_clock.get().enter(TrainingPhase::kWaiting, false)) {}

WaitingPhase::~WaitingPhase() {
  if (before_ != TrainingPhase::kNone) phase_clock.get().enter(before_, false);
}

// The letter in the first byte makes it other than 0.
TellingAction::TellingAction(uint32_t stage, char type, uint32_t micro_batch) {
  phase_clock.get().set_action(static_cast<uint64_t>(static_cast<unsigned char>(type)) << 56 |
                               static_cast<uint64_t>(stage & 0xffffff) << 32 | micro_batch);
}

TellingAction::~TellingAction() {
  phase_clock.get().set_action(0);
}

std::string TellingAction::describe(uint64_t word) {
  if (word == 0) return "";
  return std::to_string(word >> 32 & 0xffffff) + static_cast<char>(word >> 56) +
         std::to_string(word & 0xffffffff);
}

void tell_progress(int64_t step, double loss) {
  phase_clock.get().tell(step, loss);
}

void begin_telling_phases(const std::shared_ptr<const PhaseAudience>& audience) {
  phase_clock.get().begin_telling(audience);
}

void end_telling_phases(const std::shared_ptr<const PhaseAudience>& audience) {
  phase_clock.get().end_telling(audience);
}

std::optional<PhaseTimes> PhaseWindow::end_step(int64_t now_ns) {
  ++steps_;
  int64_t sum = 0;
  for (const int64_t ns : slot_) sum += ns;
  if (sum < kLeastSlotNs) return std::nullopt;
  Slot& slot = slots_[filled_++];
  const auto steps = static_cast<double>(std::exchange(steps_, 0));
  slot.step = static_cast<double>(sum) / steps;
  for (size_t phase = 0; phase < kTrainingPhases; ++phase) {
    slot.phases[phase] = static_cast<double>(std::exchange(slot_[phase], 0)) / steps;
  }
  slot.own = slot.step - slot.phases[static_cast<size_t>(TrainingPhase::kWaiting)];
  span_ns_ += sum;
  if (filled_ < kSlots) return std::nullopt;
  filled_ = 0;
  PhaseTimes times{.ended_ns = now_ns, .span_ns = std::exchange(span_ns_, 0)};
  times.step = median_of(slots_, [](const Slot& each) { return each.step; });
  times.own = median_of(slots_, [](const Slot& each) { return each.own; });
  for (size_t phase = 0; phase < kTrainingPhases; ++phase) {
    times.phases[phase] = median_of(slots_, [phase](const Slot& each) { return each.phases[phase]; });
  }
  return times;
}

void PhaseBoard::set_step(const Step& step) {
  write_whole(version_, [&] {
    steps_.store(step.number, std::memory_order_relaxed);
    step_samples_.store(step.samples, std::memory_order_relaxed);
    step_began_ns_.store(step.began_ns, std::memory_order_relaxed);
  });
}

PhaseBoard::Step PhaseBoard::newest_step() const {
  Step step;
  // Where the writer was stopped in the middle, it is a mix of two steps that follow each other.
  read_whole(version_, [&] {
    step.number = steps_.load(std::memory_order_relaxed);
    step.samples = step_samples_.load(std::memory_order_relaxed);
    step.began_ns = step_began_ns_.load(std::memory_order_relaxed);
  });
  return step;
}

void PhaseBoard::set_times(const PhaseTimes& times) {
  write_whole(version_, [&] {
    size_t next = 0;
    const auto put = [&](double value) { values_[next++].store(value, std::memory_order_relaxed); };
    put(static_cast<double>(times.ended_ns));  // exact for the first 104 days of a host, and near enough then
    put(static_cast<double>(times.span_ns));
    put(times.step);
    put(times.own);
    for (const double phase : times.phases) put(phase);
  });
}

std::optional<PhaseTimes> PhaseBoard::times() const {
  PhaseTimes times;
  const bool whole = read_whole(version_, [&] {
    size_t next = 0;
    const auto get = [&] { return values_[next++].load(std::memory_order_relaxed); };
    times.ended_ns = static_cast<int64_t>(get());
    times.span_ns = static_cast<int64_t>(get());
    times.step = get();
    times.own = get();
    for (double& phase : times.phases) phase = get();
  });
  return whole && times.ended_ns != 0 ? std::optional(times) : std::nullopt;
}

}  // namespace lockstep

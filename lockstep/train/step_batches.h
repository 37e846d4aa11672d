#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/nn/step_snapshot.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/train/batches_of.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep::train {

/// The batches of a Trainer's steps: takes them from its loader, holds those of a step until it is done, and gives
/// back to the loader those of steps that are not done, so that they come again. Used by one thread.
template <class Loader>
class StepBatches {
 public:
  using Batch = typename Loader::Batch;
  /// Whether the loader can be given batches back.
  static constexpr bool kResumes = requires(const Loader& loader) { loader.state_dict(int64_t{1}); };

  /// Both must outlive it. `progress` is the Trainer's, too: it sets unseen_batches to 0 when a step is done.
  StepBatches(Loader& loader, LoaderProgress& progress) : loader_(loader), progress_(progress) {}

  /// Before the steps of an epoch, or the rest of them. `devices`: those besides the CPU whose random numbers a step
  /// or the loader may draw; no step of the epoch is done if `at_epoch_begin`.
  void begin(std::vector<at::Device> devices, bool at_epoch_begin) {
    devices_ = std::move(devices);
    random_.emplace(devices_);
    before_epoch_ = at_epoch_begin ? state(0) : StateDict();
  }

  /// Before each step: what is given back is made again, and then draws the same numbers as now.
  void begin_step() {
    if constexpr (kResumes) random_->take({});
  }

  /// Null at the loader's end. The loader is asked for its first batch here, too.
  Batch* next() {
    if (progress_.ended) return nullptr;
    if (!batches_) batches_.emplace(loader_, &progress_.unseen_batches);
    Batch* batch = batches_->next();
    progress_.ended = batch == nullptr;
    return batch;
  }

  /// Takes at most `count` batches, which it holds then. Without any the last step's stay, to stand in with.
  bool fetch(int64_t count) {
    std::vector<Batch> fetched;
    while (static_cast<int64_t>(fetched.size()) < count) {
      Batch* batch = next();
      if (batch == nullptr) break;
      if constexpr (kResumes) {
        fetched.push_back(std::move(*batch));  // only this function has the loader's batch
      } else {
        fetched.push_back(*batch);
      }
    }
    if (!fetched.empty()) {
      held_ = std::move(fetched);
      return true;
    }
    progress_.unseen_batches = 0;  // those after the last sample need not come again
    if (held_.empty()) borrow();
    return false;
  }

  /// Those of the step.
  const std::vector<Batch>& held() const { return held_; }

  /// The steps are over: nothing is asked of the loader until the next begin().
  void end() { batches_.reset(); }

  /// After end(): the loader goes back to before the batches that no step has used. The first step draws the epoch's
  /// order, too, so `at_epoch_begin` leads to before the epoch. Unless `step_done`, random numbers are as before it.
  void give_back(bool at_epoch_begin, bool step_done) {
    progress_.ended = progress_.ended && progress_.unseen_batches == 0;
    const int64_t unseen = std::exchange(progress_.unseen_batches, 0);
    load(at_epoch_begin ? before_epoch_ : state(unseen));
    if (kResumes && !step_done) random_->restore();
  }

  void drop_held() { held_.clear(); }

  /// The loader's; empty if it has none.
  StateDict state(int64_t unseen_batches) const {
    if constexpr (kResumes) {
      return loader_.state_dict(unseen_batches);
    } else {
      return {};
    }
  }
  void load(const StateDict& state) {
    if constexpr (requires { loader_.load_state_dict(state); }) loader_.load_state_dict(state);
  }

 private:
  /// Training has been resumed after this rank's last batch, while others have more, so there is none to
  /// stand in with. Any will do, at weight 0; it is not taken from the epoch.
  void borrow() {
    if constexpr (kResumes) {
      batches_.reset();
      StepSnapshot random(devices_);
      random.take({});
      const StateDict place = state(progress_.unseen_batches);
      {
        BatchesOf<Loader> others(loader_);
        if (Batch* batch = others.next()) held_.push_back(std::move(*batch));
      }
      load(place);
      random.restore();
    }
  }

  Loader& loader_;
  LoaderProgress& progress_;
  std::vector<at::Device> devices_;
  std::optional<StepSnapshot> random_;  // of before the step
  StateDict before_epoch_;              // the loader's
  std::optional<BatchesOf<Loader>> batches_;
  std::vector<Batch> held_;
};

}  // namespace lockstep::train

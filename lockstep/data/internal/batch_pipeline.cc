#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/data/internal/batch_pipeline.h>
#include <lockstep/data/internal/loading_scope.h>
#include <lockstep/data/internal/random.h>

namespace lockstep::data::internal {
namespace {

using Clock = std::chrono::steady_clock;

std::string name_of(const EpochPlan& plan, int64_t batch) {
  std::ostringstream text;
  text << "batch " << batch << " of the epoch";
  if (plan.iterable) return text.str();
  constexpr int64_t kShown = 8;
  const auto [begin, end] = plan.slice(batch);
  text << ", samples ";
  for (int64_t i = begin; i < std::min(begin + kShown, end); ++i) {
    text << (i > begin ? ", " : "") << plan.indices[static_cast<size_t>(i)];
  }
  if (end - begin > kShown) text << ", … (" << end - begin << " in all)";
  return text.str();
}

}  // namespace

EpochPlan::Slice EpochPlan::slice(int64_t batch) const {
  if (!last_of.empty() || indices.empty()) {
    if (batch >= static_cast<int64_t>(last_of.size())) return {};
    return {batch == 0 ? 0 : last_of[static_cast<size_t>(batch - 1)], last_of[static_cast<size_t>(batch)]};
  }
  const auto total = static_cast<int64_t>(indices.size());
  const int64_t begin = first + (batch - first_batch) * batch_size;
  const int64_t end = std::min(begin + batch_size, total);
  if (begin >= total || (drop_last && end - begin < batch_size)) return {};
  return {begin, end};
}

BatchPipeline::BatchPipeline(std::shared_ptr<const EpochPlan> plan, BatchRecipe recipe,
                             BatchPipelineOptions options, std::shared_ptr<EpochProgress> progress,
                             std::shared_ptr<std::atomic<int64_t>> waited, std::shared_ptr<WorkerPool> pool)
    : plan_(std::move(plan)),
      recipe_(std::move(recipe)),
      options_(std::move(options)),
      progress_(std::move(progress)),
      waited_(std::move(waited)),
      pool_(std::move(pool)),
      next_batch_(plan_->first_batch),
      turn_(plan_->first_batch),
      drawn_(plan_->first) {
  if (pool_ == nullptr) return;
  for (int worker = 0; worker < pool_->size(); ++worker) lanes_.emplace_back(options_.prefetch_factor);
  job_ = pool_->start({[this](Worker& worker) { run(worker); }, [this] { stop(); }});
}

BatchPipeline::~BatchPipeline() {
  if (pool_ != nullptr) pool_->end(job_);
}

void BatchPipeline::stop() {
  for (Lane& lane : lanes_) lane.stop();
  {
    const std::lock_guard<std::mutex> lock(turn_mutex_);
    turns_over_ = true;
  }
  turn_changed_->notify_all();
}

BatchPipeline::Outcome BatchPipeline::make(int64_t batch) noexcept {
  RECORD_USER_SCOPE("DataLoader: make a batch");
  Outcome outcome;
  try {
    if (plan_->iterable) {
      make_from_stream(batch, outcome);
    } else {
      make_from_indices(batch, outcome);
    }
  } catch (...) {
    outcome.failure = std::current_exception();
  }
  return outcome;
}

void BatchPipeline::make_from_indices(int64_t batch, Outcome& outcome) {
  const auto [begin, end] = plan_->slice(batch);
  outcome.samples = end - begin;
  if (begin == end) return;
  const auto indices =
      std::span(plan_->indices).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  const LoadingScope scope(plan_->base_seed, begin, end - begin, indices);
  try {
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < plan_->dataset_size, "the sampler gave index ", index,
                        ", but the data set has ", plan_->dataset_size, " samples, 0 to ",
                        plan_->dataset_size - 1);
    }
    outcome.batch = recipe_.make(indices);
  } catch (...) {
    rethrow_with_context("while loading " + name_of(*plan_, batch));
  }
}

void BatchPipeline::make_from_stream(int64_t batch, Outcome& outcome) {
  int64_t position = 0;
  {
    std::unique_lock<std::mutex> lock(turn_mutex_);
    turn_changed_->wait(lock, [&] { return turns_over_ || turn_ == batch; });
    if (turns_over_) return;
    position = drawn_;
  }
  // The turn is this thread's until it passes it on, whatever happens to the stream.
  std::shared_ptr<void> drawn;
  int64_t taken = 0;
  std::exception_ptr failure;
  try {
    const LoadingScope scope(plan_->base_seed, position, plan_->batch_size, {});
    drawn = recipe_.draw(plan_->batch_size, taken);
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::lock_guard<std::mutex> lock(turn_mutex_);
    drawn_ += taken;
    // At the end every worker comes by, to see that it is the end.
    if (failure != nullptr || taken < plan_->batch_size) turns_over_ = true;
    ++turn_;
  }
  turn_changed_->notify_all();
  try {
    if (failure) std::rethrow_exception(failure);
    if (taken == 0 || (plan_->drop_last && taken < plan_->batch_size)) return;
    outcome.samples = taken;
    const LoadingScope scope(plan_->base_seed, position, taken, {});
    outcome.batch = recipe_.finish(std::move(drawn));
  } catch (...) {
    const std::string where =
        failure ? "sample " + std::to_string(position + taken)
                : "samples " + std::to_string(position) + " to " + std::to_string(position + taken - 1);
    rethrow_with_context("while loading " + name_of(*plan_, batch) + ", " + where + " of the stream");
  }
}

void BatchPipeline::run(Worker& worker) {
  Lane& lane = lanes_[static_cast<size_t>(worker.info.id)];
  const int workers = worker.info.num_workers;
  std::exception_ptr failure;
  try {
    worker.info.seed = plan_->base_seed + worker.info.id;
    worker.info.generator = make_generator(static_cast<uint64_t>(worker.info.seed));
    if (!worker.prepared && options_.worker_init_fn) options_.worker_init_fn(worker.info.id);
    worker.prepared = true;
  } catch (...) {
    try {
      rethrow_with_context("in worker_init_fn of worker " + std::to_string(worker.info.id));
    } catch (...) {
      failure = std::current_exception();
    }
  }
  const int64_t first = plan_->first_batch;
  const int64_t before = first % workers;  // batch b is worker b mod N's, also after a resume
  for (int64_t batch = first + (worker.info.id - before + workers) % workers;; batch += workers) {
    {
      RECORD_USER_SCOPE("DataLoader worker: wait for room");
      if (!lane.reserve(1)) return;
    }
    Outcome outcome = failure ? Outcome{.failure = failure} : make(batch);
    const bool more = outcome.samples > 0;
    lane.push(std::move(outcome));
    if (!more) return;
  }
}

BatchPipeline::Outcome BatchPipeline::take(Lane& lane) {
  std::optional<Outcome> outcome = lane.pop(std::chrono::nanoseconds(0));
  if (!outcome) {
    const auto since = Clock::now();
    outcome = lane.pop(options_.timeout.count() == 0 ? std::nullopt : std::optional(options_.timeout));
    waited_->fetch_add((Clock::now() - since).count(), std::memory_order_relaxed);
    TORCH_CHECK(outcome || !lane.stopped(),
                "this epoch was ended by a later begin() of its loader, whose workers are persistent; finish "
                "one epoch before the next, or leave persistent_workers false");
    TORCH_CHECK(outcome, "DataLoader timed out after ", format_duration(options_.timeout), " waiting for ",
                name_of(*plan_, next_batch_), ", which worker ",
                next_batch_ % static_cast<int64_t>(lanes_.size()),
                " makes; look at what the data set waits for there, or allow more time with .timeout");
  }
  lane.release(1);
  return *std::move(outcome);
}

std::shared_ptr<void> BatchPipeline::next() {
  if (progress_->phase != EpochPhase::kUnderWay) return nullptr;
  // The caller goes on after a batch that could not be made; until now that batch would have come again.
  if (const int64_t failed = std::exchange(failed_samples_, 0); failed > 0) pass(failed);
  const auto [begin, end] = plan_->slice(next_batch_);
  if (plan_->iterable || begin != end) mark_step(StepMark::kBatch, waited_.get());
  // Readers of traces know a loader by the first part, which is Python's.
  RECORD_USER_SCOPE("enumerate(DataLoader)#lockstep::data::DataLoader.next");
  Outcome outcome;
  if (pool_ == nullptr) {
    const auto since = Clock::now();
    outcome = make(next_batch_);
    waited_->fetch_add((Clock::now() - since).count(), std::memory_order_relaxed);
  } else {
    outcome = take(lanes_[static_cast<size_t>(next_batch_ % static_cast<int64_t>(lanes_.size()))]);
  }
  if (outcome.samples == 0) {
    progress_->phase = outcome.failure ? EpochPhase::kFailed : EpochPhase::kFinished;
  }
  if (outcome.failure) {
    failed_samples_ = outcome.samples;
    std::rethrow_exception(std::move(outcome.failure));
  }
  enter_phase(TrainingPhase::kForward);
  if (outcome.samples > 0) {
    pass(outcome.samples);
    count_samples(outcome.samples);
  }
  return std::move(outcome.batch);
}

void BatchPipeline::pass(int64_t samples) {
  ++next_batch_;
  ++progress_->batches;
  progress_->samples += samples;
}

}  // namespace lockstep::data::internal

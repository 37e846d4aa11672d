#include <algorithm>
#include <pthread.h>
#include <sstream>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/data/internal/batch_pipeline.h>

// OpenMP's, found at run time in the runtime that LibTorch loaded, if it loaded one.
extern "C" __attribute__((weak)) void omp_set_num_threads(int threads);

namespace lockstep::data::internal {
namespace {

/// Operations of this thread stay on this thread, as in Python's workers. Without it, OpenMP would start a
/// second team of threads for it, which would compete with the training's.
void compute_alone() {
  at::get_num_threads();  // ATen's per-thread initialisation, which would undo the next line if it came later
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
}

std::string describe(int64_t batch, std::span<const int64_t> indices) {
  constexpr size_t kShown = 8;
  std::ostringstream text;
  text << "while loading batch " << batch << " of the epoch, samples ";
  for (size_t i = 0; i < std::min(indices.size(), kShown); ++i) text << (i > 0 ? ", " : "") << indices[i];
  if (indices.size() > kShown) text << ", … (" << indices.size() << " in all)";
  return text.str();
}

}  // namespace

BatchPipeline::BatchPipeline(Plan plan, MakeBatch make_batch)
    : plan_(std::move(plan)), make_batch_(std::move(make_batch)) {
  if (plan_.ahead > 0) thread_ = std::thread(&BatchPipeline::run, this);
}

BatchPipeline::~BatchPipeline() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

BatchPipeline::Outcome BatchPipeline::make_next() noexcept {
  const auto total = static_cast<int64_t>(plan_.indices.size());
  const int64_t count = std::min(plan_.batch_size, total - position_);
  if (count <= 0 || (plan_.drop_last && count < plan_.batch_size)) return {};
  const auto indices =
      std::span(plan_.indices).subspan(static_cast<size_t>(position_), static_cast<size_t>(count));
  const int64_t batch = batches_made_++;
  position_ += count;
  Outcome outcome;
  try {
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < plan_.dataset_size, "the sampler gave index ", index,
                        ", but the data set has ", plan_.dataset_size, " samples, 0 to ",
                        plan_.dataset_size - 1);
    }
    outcome.batch = make_batch_(indices);
  } catch (...) {
    try {
      rethrow_with_context(describe(batch, indices));
    } catch (...) {
      outcome.failure = std::current_exception();
    }
  }
  return outcome;
}

void BatchPipeline::run() {
  ::pthread_setname_np(::pthread_self(), "lockstep-loader");
  compute_alone();
  for (bool more = true; more;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || static_cast<int64_t>(ready_.size()) < plan_.ahead; });
      if (stop_) return;
    }
    Outcome outcome = make_next();
    more = outcome.batch != nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ready_.push_back(std::move(outcome));
    }
    changed_.notify_all();
  }
}

std::shared_ptr<void> BatchPipeline::next() {
  if (over_) return nullptr;
  Outcome outcome;
  if (plan_.ahead == 0) {
    outcome = make_next();
  } else {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !ready_.empty(); });
    outcome = std::move(ready_.front());
    ready_.pop_front();
  }
  changed_.notify_all();
  over_ = outcome.batch == nullptr;
  if (outcome.failure) std::rethrow_exception(std::move(outcome.failure));
  return std::move(outcome.batch);
}

}  // namespace lockstep::data::internal

#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/data/internal/epoch_planner.h>
#include <lockstep/data/internal/random.h>

namespace lockstep::data::internal {
namespace {

constexpr const char* kOwner = "DataLoader";

void check(const DataLoaderOptions& options, bool iterable) {
  TORCH_CHECK_VALUE(options.batch_size > 0,
                    "batch_size should be a positive integer value, but got batch_size=", options.batch_size);
  if (iterable) {
    TORCH_CHECK_VALUE(!options.shuffle,
                      "DataLoader with an iterable data set: expected unspecified shuffle "
                      "option, but got shuffle=true; shuffle within its stream()");
    TORCH_CHECK_VALUE(options.sampler == nullptr && options.batch_sampler == nullptr,
                      "DataLoader with an iterable data set: expected unspecified sampler and batch_sampler "
                      "options; its samples come in the order of its stream()");
  }
  TORCH_CHECK_VALUE(
      options.sampler == nullptr || !options.shuffle,
      "sampler option is mutually exclusive with shuffle; to shuffle with a sampler, tell the sampler");
  TORCH_CHECK_VALUE(options.batch_sampler == nullptr || (options.batch_size == 1 && !options.shuffle &&
                                                         options.sampler == nullptr && !options.drop_last),
                    "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and "
                    "drop_last; give them "
                    "to the batch sampler");
  TORCH_CHECK_VALUE(options.num_workers >= 0,
                    "num_workers option should be non-negative, but got num_workers=", options.num_workers,
                    "; use num_workers=0 to load in the calling thread");
  TORCH_CHECK_VALUE(
      options.prefetch_factor > 0,
      "prefetch_factor should be at least 1, but got prefetch_factor=", options.prefetch_factor);
  TORCH_CHECK_VALUE(options.timeout.count() >= 0,
                    "timeout option should be non-negative, but got timeout=", options.timeout.count(),
                    " ms");
  if (options.num_workers > 0) return;
  TORCH_CHECK_VALUE(!options.persistent_workers, "persistent_workers option needs num_workers > 0");
  TORCH_CHECK_VALUE(options.timeout.count() == 0,
                    "timeout option needs num_workers > 0: without workers batches are made in the calling "
                    "thread, which can't stop waiting for itself");
}

/// Tells two orders apart (FNV-1a over the numbers), so that a resumed epoch never goes on in another.
int64_t order_of(const EpochPlan& plan) {
  uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&](int64_t number) { hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3U; };
  for (const int64_t index : plan.indices) add(index);
  for (const int64_t last : plan.last_of) add(last);
  return static_cast<int64_t>(hash);
}

}  // namespace

EpochPlanner::EpochPlanner(std::optional<int64_t> dataset_size, const DataLoaderOptions& options)
    : dataset_size_(dataset_size), options_(options), waited_(std::make_shared<std::atomic<int64_t>>(0)) {
  check(options, iterable());
  if (options.seed) generator_ = make_generator(static_cast<uint64_t>(*options.seed));
  if (iterable()) return;
  TORCH_CHECK_VALUE(*dataset_size >= 0, "DataLoader: the data set's size() is ", *dataset_size);
  if (options.sampler != nullptr || options.batch_sampler != nullptr) return;
  if (options.shuffle) {
    own_sampler_ = std::make_unique<RandomSampler>(*dataset_size, generator_);
  } else {
    own_sampler_ = std::make_unique<SequentialSampler>(*dataset_size);
  }
}

int64_t EpochPlanner::batches_of(int64_t samples) const {
  return samples / options_.batch_size + (!options_.drop_last && samples % options_.batch_size != 0 ? 1 : 0);
}

int64_t EpochPlanner::batches() const {
  return options_.batch_sampler != nullptr ? options_.batch_sampler->size() : batches_of(sampler().size());
}

StateDict EpochPlanner::sampler_state() const {
  if (iterable()) return {};
  return options_.batch_sampler != nullptr ? options_.batch_sampler->state_dict() : sampler().state_dict();
}

void EpochPlanner::load_sampler(const StateDict& state) {
  if (iterable()) return;
  if (options_.batch_sampler != nullptr) {
    options_.batch_sampler->load_state_dict(state);
  } else {
    sampler().load_state_dict(state);
  }
}

void EpochPlanner::ask_for_order(EpochPlan& plan) const {
  if (iterable()) return;
  if (options_.batch_sampler == nullptr) {
    plan.indices = sampler().indices();
    return;
  }
  for (const auto& batch : options_.batch_sampler->batches()) {
    TORCH_CHECK_VALUE(!batch.empty(), "the batch sampler gave an empty batch, number ", plan.last_of.size());
    plan.indices.insert(plan.indices.end(), batch.begin(), batch.end());
    plan.last_of.push_back(static_cast<int64_t>(plan.indices.size()));
  }
}

void EpochPlanner::go_on(EpochPlan& plan, const EpochProgress& loaded) const {
  TORCH_CHECK_VALUE(
      iterable() || order_of(plan) == loaded_order_,
      "DataLoader: the sampler gives another order than that of the epoch which was saved after ",
      loaded.samples,
      " samples. Make it with the same arguments and seed, on the same data set "
      "and number of ranks, and begin at the same epoch (set_epoch); or don't load the state");
  plan.first = loaded.samples;
  plan.first_batch = loaded.batches;
}

int64_t EpochPlanner::new_base_seed() const {
  // Python draws a base seed for its workers at the start of each epoch, whatever the sampler; of persistent
  // workers only at the first. Drawing it too keeps the generator, and with it every later random number of
  // the program, at Python's state.
  if (!options_.persistent_workers || !base_seed_) return draw_seed(generator_);
  return static_cast<int64_t>(mix_bits(static_cast<uint64_t>(*base_seed_)) >> 1);
}

std::unique_ptr<BatchPipeline> EpochPlanner::start_epoch(BatchRecipe recipe) {
  auto plan = std::make_shared<EpochPlan>(EpochPlan{.iterable = iterable(),
                                                    .batch_size = options_.batch_size,
                                                    .drop_last = options_.drop_last,
                                                    .dataset_size = dataset_size_.value_or(0)});
  // A resumed epoch has drawn its base seed before it was saved.
  plan->base_seed = loaded() ? *base_seed_ : new_base_seed();
  ask_for_order(*plan);
  auto progress = std::make_shared<EpochProgress>();
  if (loaded()) {
    const auto before = std::exchange(progress_, std::make_shared<EpochProgress>());
    go_on(*plan, *before);
    *progress = *before;
  }
  progress->phase = EpochPhase::kUnderWay;
  sampler_state_ = sampler_state();
  base_seed_ = plan->base_seed;
  plan_ = plan;
  progress_ = progress;
  std::shared_ptr<WorkerPool> pool = pool_;
  if (options_.num_workers > 0 && pool == nullptr) {
    pool = std::make_shared<WorkerPool>(options_.num_workers);
    if (options_.persistent_workers) pool_ = pool;
  }
  return std::make_unique<BatchPipeline>(
      std::move(plan), std::move(recipe),
      BatchPipelineOptions{options_.prefetch_factor, options_.timeout, options_.worker_init_fn},
      std::move(progress), waited_, std::move(pool));
}

void EpochPlanner::set_epoch(int64_t epoch) {
  if (iterable()) return;
  if (options_.batch_sampler != nullptr) {
    options_.batch_sampler->set_epoch(epoch);
  } else {
    sampler().set_epoch(epoch);
  }
}

bool EpochPlanner::start_at(int64_t position) {
  if (iterable()) return false;
  if (!(options_.batch_sampler != nullptr ? options_.batch_sampler->start_at(position)
                                          : sampler().start_at(position))) {
    return false;
  }
  if (loaded()) progress_ = std::make_shared<EpochProgress>();
  return true;
}

StateDict EpochPlanner::state_dict(int64_t unseen_batches, bool end_unseen) const {
  StateDict state;
  if (generator_) state["generator"] = generator_->get_state();
  if (base_seed_) state["base_seed"] = *base_seed_;
  if (loaded()) {
    state["epoch_under_way"] = true;
    state["epoch_finished"] = false;
    state["samples"] = progress_->samples;
    state["batches"] = progress_->batches;
    state["order"] = loaded_order_;
    state["sampler"] = to_object(sampler_state_);
    return state;
  }
  const int64_t given = plan_ == nullptr ? 0 : progress_->batches - plan_->first_batch;
  TORCH_CHECK_VALUE(unseen_batches >= 0 && unseen_batches <= given,
                    "DataLoader::state_dict: ", unseen_batches, " batches are to come again, but ", given,
                    " have been given in this epoch");
  const bool again = unseen_batches > 0;
  EpochPhase phase = progress_->phase;
  if (phase == EpochPhase::kFinished && (again || end_unseen)) phase = EpochPhase::kUnderWay;
  const bool under_way = phase == EpochPhase::kUnderWay || phase == EpochPhase::kFailed;
  const bool finished = phase == EpochPhase::kFinished || phase == EpochPhase::kLoadedFinished;
  state["epoch_under_way"] = under_way;
  state["epoch_finished"] = finished;
  state["sampler"] = to_object(under_way || finished ? sampler_state_ : sampler_state());
  if (!under_way) return state;
  const int64_t batches = progress_->batches - unseen_batches;
  int64_t samples = progress_->samples;
  if (again) {  // all batches of a stream but its last are full
    samples = iterable() ? plan_->first + (given - unseen_batches) * plan_->batch_size
                         : plan_->slice(batches).begin;
  }
  state["samples"] = samples;
  state["batches"] = batches;
  state["order"] = order_of(*plan_);
  return state;
}

void EpochPlanner::load_state_dict(const StateDict& state) {
  const bool under_way = state_value<bool>(state, "epoch_under_way", kOwner);
  const bool finished = state_value<bool>(state, "epoch_finished", kOwner);
  const auto of_sampler = state_value<StateDict>(state, "sampler", kOwner);
  std::optional<int64_t> base_seed;
  if (under_way || state.count("base_seed") != 0) {
    base_seed = state_value<int64_t>(state, "base_seed", kOwner);
  }
  EpochProgress progress;
  int64_t order = 0;
  if (under_way) {
    progress.phase = EpochPhase::kLoaded;
    progress.samples = state_value<int64_t>(state, "samples", kOwner);
    progress.batches = state_value<int64_t>(state, "batches", kOwner);
    order = state_value<int64_t>(state, "order", kOwner);
    TORCH_CHECK_VALUE(progress.samples >= 0 && progress.batches >= 0,
                      "DataLoader::load_state_dict: ", progress.samples, " samples in ", progress.batches,
                      " batches were seen; both are 0 or more");
  } else if (finished) {
    progress.phase = EpochPhase::kLoadedFinished;
  }
  std::optional<at::Tensor> of_generator;
  if (generator_) of_generator = state_value<at::Tensor>(state, "generator", kOwner);
  // Between epochs the loader's generator says all about its own sampler.
  if (under_way || own_sampler_ == nullptr) load_sampler(of_sampler);
  if (finished && own_sampler_ == nullptr) {
    // The state is that of the finished epoch's order; the next one follows it.
    EpochPlan skipped;
    ask_for_order(skipped);
  }
  if (generator_) generator_->set_state(*of_generator);
  progress_ = std::make_shared<EpochProgress>(progress);
  plan_ = nullptr;
  base_seed_ = base_seed;
  sampler_state_ = of_sampler;
  loaded_order_ = order;
}

}  // namespace lockstep::data::internal

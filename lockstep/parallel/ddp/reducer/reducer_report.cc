// What the reducer says of itself: errors' texts, settings of the measurements, the report.
#include <sstream>

#include <c10/util/Exception.h>

#include <lockstep/parallel/ddp/reducer/reducer.h>

namespace lockstep {

std::string Reducer::names_without_gradient() const {
  std::ostringstream names;
  size_t missing = 0;
  constexpr size_t kShown = 20;
  for (size_t index = 0; index < settings_.size(); ++index) {
    if (buckets_.ready(index) || (is_first_static_round() && use_.counted(index))) continue;
    if (++missing <= kShown) names << (missing > 1 ? ", " : "") << settings_.names[index];
  }
  if (missing > kShown) names << " and " << missing - kShown << " more";
  return names.str();
}

std::string Reducer::unfinished_text() const {
  std::ostringstream text;
  text << "Expected to have finished reduction in the prior iteration before starting a new one. Rank "
       << settings_.group()->getRank()
       << ": these parameters received no gradient: " << names_without_gradient()
       << ". They were not used in producing the loss, or backward() ended with an exception. ";
  if (settings_.options.find_unused_parameters) {
    text << "find_unused_parameters looks for them from the tensors that forward() returns: make sure that "
            "all of these take part in the loss, and that the graph leads to them from there";
  } else {
    text << "Set find_unused_parameters = true if some parameters take no part in some iterations, make sure "
            "that all outputs of forward() take part in the loss, or wrap iterations that are not to be "
            "reduced in no_sync()";
  }
  return text.str();
}

void Reducer::check_finalized() const {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!round_.open(), unfinished_text());
}

void Reducer::set_sample_rate(int rounds) {
  TORCH_CHECK_VALUE(rounds >= 1, "DDP runtime logging sample rate should be equal or greater than 1; it is ",
                    rounds);
  std::lock_guard lock(mutex_);
  clock_.set_sample_rate(rounds);
}

std::vector<size_t> Reducer::bucket_bytes() const {
  return buckets_.bytes();
}

std::vector<at::Tensor> Reducer::bucket_memory() const {
  std::lock_guard lock(mutex_);
  std::vector<at::Tensor> memory;
  for (const Bucket& bucket : buckets_.all()) {
    if (bucket.memory) memory.push_back(bucket.memory->buffer());
  }
  return memory;
}

int64_t Reducer::rounds() const {
  std::lock_guard lock(mutex_);
  return rounds_;
}

int64_t Reducer::shadowed_rounds() const {
  std::lock_guard lock(mutex_);
  return shadowed_rounds_;
}

void Reducer::take_shadowed_rounds() {
  std::lock_guard lock(mutex_);
  shadowed_rounds_ = 0;
}

void Reducer::set_rounds(int64_t rounds) {
  std::lock_guard lock(mutex_);
  rounds_ = rounds_at_restart_ = rounds;
  shadowed_rounds_ = 0;
}

void Reducer::set_steps_in_backward() {
  std::lock_guard lock(mutex_);
  steps_in_backward_ = true;
}

bool Reducer::stepped_since_round() const {
  std::lock_guard lock(mutex_);
  return steps_in_backward_ || fingerprint_.differs(settings_.tensors);
}

Reducer::Report Reducer::report() const {
  std::lock_guard lock(mutex_);
  Report report{.initial_bucket_bytes = initial_bucket_bytes_,
                .bucket_bytes = buckets_.bytes(),
                .bucket_parameters = {},
                .caps = sizes_.caps(),
                .rebuilt = rebuilt_,
                .tuned = sizes_.tuned(),
                .static_graph = settings_.options.static_graph,
                .can_set_static_graph = settings_.options.static_graph || use_.same_graph(),
                .unused_bytes = use_.unused_bytes(),
                .arrival_order = arrival_order_,
                .hook = settings_.hook_name,
                .error = error_,
                .last = clock_.last(),
                .average = clock_.average(),
                .rounds = rounds_};
  for (const Bucket& bucket : buckets_.all()) report.bucket_parameters.push_back(bucket.parameters.size());
  return report;
}

}  // namespace lockstep

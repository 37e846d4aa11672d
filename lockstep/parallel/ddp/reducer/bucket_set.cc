#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/log.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/parallel/ddp/reducer/bucket_set.h>

namespace lockstep {
namespace {

/// So many moves of buckets are worth a warning.
constexpr int kMovesToWarn = 10;

}  // namespace

BucketSet::BucketSet(const ReducerSettings& settings)
    : settings_(settings),
      ready_(settings.size(), false),
      own_storage_(settings.size(),
                   c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>())),
      had_gradient_(settings.size(), true) {}

BucketSet::~BucketSet() {
  if (slots_) slots_->disconnect();
  for (Bucket& bucket : buckets_) abandon_memory(bucket);
}

std::vector<ParameterSize> BucketSet::sizes() const {
  std::vector<ParameterSize> sizes;
  for (size_t index = 0; index < settings_.size(); ++index) {
    const at::Tensor& parameter = settings_.tensors[index];
    // All devices are of one type, so the number tells them apart; the CPU has none (-1).
    const int device = parameter.device().index() + 1;
    const int kind =
        device * static_cast<int>(at::ScalarType::NumOptions) + static_cast<int>(settings_.dtypes[index]);
    sizes.push_back({parameter.nbytes(), kind, settings_.sparse[index]});
  }
  return sizes;
}

void BucketSet::build(const std::vector<size_t>& order, const std::vector<size_t>& limits) {
  make(assign_buckets(sizes(), order, limits));
}

void BucketSet::build_initial(const std::vector<size_t>& limits) {
  std::vector<size_t> order(settings_.size());
  std::iota(order.begin(), order.end(), 0);
  auto assignment = assign_buckets(sizes(), order, limits);
  std::reverse(assignment.begin(), assignment.end());
  make(std::move(assignment));
}

void BucketSet::make(std::vector<std::vector<size_t>> assignment) {
  if (slots_) slots_->disconnect();
  auto old_buckets = std::exchange(buckets_, {});
  const auto old_places = std::exchange(places_, std::vector<Place>(settings_.size()));
  for (auto& members : assignment) {
    Bucket bucket;
    bucket.purpose = formatted("DDP bucket %zu of %zu", buckets_.size() + 1, assignment.size());
    bucket.sparse = settings_.sparse[members.front()];
    bucket.parameters = std::move(members);
    if (!bucket.sparse) give_memory(bucket, settings_);
    for (size_t position = 0; position < bucket.parameters.size(); ++position) {
      places_[bucket.parameters[position]] = {buckets_.size(), position};
    }
    buckets_.push_back(std::move(bucket));
  }
  std::vector<size_t> bytes;
  for (size_t index = 0; index < settings_.size(); ++index) {
    const bool sparse = settings_.sparse[index];
    bytes.push_back(sparse ? 0 : settings_.tensors[index].nbytes());
    if (!sparse && !old_buckets.empty()) {
      keep_gradient(index, old_buckets[old_places[index].bucket], old_places[index].position);
    }
  }
  for (Bucket& old : old_buckets) abandon_memory(old);
  slots_ = std::make_shared<GradientSlots>(std::move(bytes), [this](size_t index) {
    const Place place = places_[index];
    // What is ready may be on its way to the others. What is added to a gradient that is there needs no slot;
    // as a bucket view that one lies in it already.
    if (ready_[index] || settings_.reduce_dtype || settings_.tensors[index].mutable_grad().defined()) {
      return MemoryBlock{};
    }
    return buckets_[place.bucket].memory->take(place.position);
  });
}

/// A gradient that lies in an old bucket (not zeroed, accumulated under no_sync) moves along, unless the user
/// holds it: that one stays where it is, and is copied in and back.
void BucketSet::keep_gradient(size_t index, const Bucket& old, size_t old_position) {
  at::NoGradGuard no_grad;
  const at::Tensor& gradient = settings_.tensors[index].grad();
  if (!gradient.defined() || gradient.layout() != c10::kStrided || gradient.requires_grad() ||
      !lies_in_slot(old, old_position, gradient) ||
      (!settings_.options.gradient_as_bucket_view && held_by_others(gradient))) {
    return;
  }
  const Place place = places_[index];
  buckets_[place.bucket].views[place.position].copy_(gradient);
  give_slot(index);
}

std::vector<size_t> BucketSet::order() const {
  std::vector<size_t> order;
  for (const Bucket& bucket : buckets_) {
    order.insert(order.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  return order;
}

std::vector<size_t> BucketSet::bytes() const {
  std::vector<size_t> bytes;
  for (const Bucket& bucket : buckets_) bytes.push_back(bucket.bytes);
  return bytes;
}

void BucketSet::begin_round() {
  std::fill(ready_.begin(), ready_.end(), false);
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.work.reset();
    bucket.future.reset();
    bucket.copy_back.clear();
    bucket.streams.clear();
    bucket.sparse_gradient.reset();
  }
}

void BucketSet::mark_ready(size_t index) {
  ready_[index] = true;
  Bucket& bucket = buckets_[places_[index].bucket];
  --bucket.pending;
  bucket.streams.note(settings_.tensors[index].device());
}

// ---- Gradients, on their way into the buckets

void BucketSet::before_gradient(size_t index) {
  had_gradient_[index] = settings_.tensors[index].grad().defined();
}

/// If autograd has made the gradient, nothing of the user's lies in its memory, and its kernel may write the
/// next one into the slot.
void BucketSet::after_gradient(size_t index) {
  const at::Tensor& gradient = settings_.tensors[index].grad();
  if (had_gradient_[index] || gradient.layout() != c10::kStrided) return;
  own_storage_[index] = gradient.storage().getWeakStorageImpl();
  // Nested passes get no slots.
  if (settings_.sparse[index] || settings_.reduce_dtype ||
      slots_->graph_task() != torch::autograd::get_current_graph_task_id()) {
    return;
  }
  const Place place = places_[index];
  slots_->arrived(index, gradient.const_data_ptr(),
                  lies_in_slot(buckets_[place.bucket], place.position, gradient));
}

/// Whether the user may see the gradient's memory otherwise than through the parameter: a tensor shows it, or
/// it is not what autograd or the reducer made, but a buffer of the user's.
bool BucketSet::known_to_others(size_t index, const at::Tensor& incoming) const {
  const at::Tensor& gradient = settings_.tensors[index].grad();
  return held_by_others(gradient, incoming) ||
         own_storage_[index]._unsafe_get_target() != gradient.storage().unsafeGetStorageImpl();
}

void BucketSet::take(size_t index, const at::Tensor& incoming, StepClock& clock) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  if (bucket.sparse) return take_sparse(bucket, index, clock);
  at::Tensor& gradient = settings_.tensors[index].mutable_grad();
  TORCH_CHECK(gradient.layout() == c10::kStrided, "the gradient of parameter '", settings_.names[index],
              "' is sparse, which its module did not tell: only Embedding and EmbeddingBag modules with "
              "sparse(true) may have sparse gradients");
  const at::Tensor& view = bucket.views[place.position];
  const bool in_slot = lies_in_slot(bucket, place.position, gradient);
  clock.gradient(view.nbytes(), in_slot);
  const bool as_view = settings_.options.gradient_as_bucket_view;
  at::NoGradGuard no_grad;
  if (!in_slot) {
    if (bucket.memory->taken(place.position)) move_to_new_memory(bucket, index);
    const at::Tensor& slot = bucket.views[place.position];
    slot.copy_(gradient);
    // A gradient with a history (create_graph) keeps its identity; one of lower precision its type; one that
    // others may know (a hook has kept it, say) its memory, except as a bucket view, as in PyTorch.
    const bool stays = !as_view && known_to_others(index, incoming);
    if (stays || gradient.requires_grad() || gradient.scalar_type() != slot.scalar_type() ||
        settings_.reduce_dtype) {
      bucket.copy_back.push_back(place.position);
      return;
    }
    give_slot(index);
  } else if (as_view) {
    gradient = view;
  }
}

void BucketSet::take_sparse(Bucket& bucket, size_t index, StepClock& clock) {
  const at::Tensor& gradient = settings_.tensors[index].grad();
  TORCH_CHECK(gradient.is_sparse(), "the gradient of parameter '", settings_.names[index],
              "' is dense, although its module has sparse(true)");
  if (gradient.use_count() > 1) bucket.copy_back.push_back(0);
  bucket.sparse_gradient = gradient;
  clock.gradient(gradient._values().nbytes(), false);
}

void BucketSet::take_nothing(size_t index) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  at::NoGradGuard no_grad;
  if (bucket.sparse) {
    const at::Tensor& gradient = settings_.tensors[index].grad();
    bucket.sparse_gradient = gradient.defined() ? gradient : empty_sparse_gradient(settings_.tensors[index]);
    if (gradient.defined()) bucket.copy_back.push_back(0);
  } else {
    if (bucket.memory->taken(place.position)) move_to_new_memory(bucket, index);
    bucket.views[place.position].zero_();
  }
}

void BucketSet::take_zeros() {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    if (bucket.sparse) {
      bucket.sparse_gradient = empty_sparse_gradient(settings_.tensors[bucket.parameters.front()]);
    } else if (bucket.memory->any_taken()) {
      const auto old_memory = bucket.memory;
      give_memory(bucket, settings_);
      old_memory->abandon();
    } else {
      at::Tensor(bucket.memory->buffer()).zero_();
    }
  }
  for (Bucket& bucket : buckets_) bucket.pending = 0;
}

/// A tensor outlives its step in the slot that `needed`, a parameter, needs. What has arrived in this round
/// moves along.
void BucketSet::move_to_new_memory(Bucket& bucket, size_t needed) {
  if (++moves_ == kMovesToWarn) {
    LOCKSTEP_LOG(kWarning) << "memory of the gradient of '" << settings_.names[needed]
                           << "' is still in use, so its bucket of "
                           << format_bytes(static_cast<int64_t>(bucket.bytes)) << " moves to new memory; the "
                           << kMovesToWarn
                           << "th such move, each of which costs time and memory. If the program keeps "
                              "gradients beyond their step, clone() them";
  }
  bucket.streams.join(bucket.views.front().device());  // what has arrived may have come on others
  const auto old_memory = bucket.memory;
  auto old_views = bucket.views;
  give_memory(bucket, settings_);
  for (size_t position = 0; position < bucket.parameters.size(); ++position) {
    const size_t index = bucket.parameters[position];
    if (!ready_[index]) continue;
    bucket.views[position].copy_(old_views[position]);
    const at::Tensor& gradient = settings_.tensors[index].grad();
    if (!gradient.defined() || gradient.const_data_ptr() != old_views[position].const_data_ptr()) continue;
    if (!settings_.options.gradient_as_bucket_view && held_by_others(gradient)) {
      bucket.copy_back.push_back(position);
      continue;
    }
    give_slot(index);
  }
  old_views.clear();
  old_memory->abandon();
}

// ---- And back

void BucketSet::give_slot(size_t index) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  at::Tensor& gradient = settings_.tensors[index].mutable_grad();
  gradient = settings_.options.gradient_as_bucket_view ? bucket.views[place.position]
                                                       : slot_tensor(bucket, place.position);
  own_storage_[index] = gradient.storage().getWeakStorageImpl();
}

void BucketSet::give_results(Bucket& bucket) {
  at::NoGradGuard no_grad;
  if (bucket.sparse && bucket.copy_back.empty() && bucket.sparse_gradient.defined()) {
    settings_.tensors[bucket.parameters[0]].mutable_grad() = bucket.sparse_gradient;
  }
  for (const size_t position : bucket.copy_back) {
    put(bucket.parameters[position], bucket.sparse ? bucket.sparse_gradient : bucket.views[position]);
  }
}

void BucketSet::drop_gradient(size_t index) {
  at::Tensor& gradient = settings_.tensors[index].mutable_grad();
  if (!gradient.defined()) return;
  const bool in_users_memory =
      gradient.layout() == c10::kStrided &&
      own_storage_[index]._unsafe_get_target() != gradient.storage().unsafeGetStorageImpl();
  if (in_users_memory) {
    at::NoGradGuard no_grad;
    gradient.detach().zero_();
  } else {
    gradient.reset();
  }
}

void BucketSet::put(size_t index, const at::Tensor& values) {
  at::Tensor& gradient = settings_.tensors[index].mutable_grad();
  const auto dtype = settings_.dtypes[index];
  const bool dense = values.layout() == c10::kStrided;
  if (gradient.defined() && (!settings_.reduce_dtype || gradient.scalar_type() == dtype)) {
    // What detach() gives shares a dense tensor's memory, but not a sparse one's number of rows.
    (dense ? gradient.detach() : gradient).copy_(values);
  } else {
    gradient = dense ? values.to(dtype, /*non_blocking=*/false, /*copy=*/true) : values;
    if (dense) own_storage_[index] = gradient.storage().getWeakStorageImpl();
  }
}

}  // namespace lockstep

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <lockstep/base/log.h>
#include <lockstep/device/streams.h>
#include <lockstep/parallel/ddp/hooks/internal/hook_operations.h>
#include <lockstep/parallel/ddp/hooks/internal/low_rank.h>
#include <lockstep/parallel/ddp/hooks/internal/powersgd_data.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>

// A compressed iteration of a bucket: M are its gradients, as matrices, with the error of the iteration before
//
//   in the hook               P = M Q, for a random Q or the last one, made orthonormal
//                             sum the Ps over the ranks, together with the gradients that stay uncompressed
//   in the sum's callback     make P orthonormal; Q = Mᵀ P; average the Qs over the ranks
//   in the average's callback gradients = P Qᵀ; error = M - gradients
namespace lockstep {
namespace {

using Data = PowerSGDState::Data;

/// What one bucket's compression has at hand while it is on its way.
class Compression : public std::enable_shared_from_this<Compression> {
 public:
  Compression(std::shared_ptr<Data> data, ProcessGroup group, const PowerSGDOptions& options,
              const GradBucket& bucket)
      : data_(std::move(data)),
        group_(std::move(group)),
        world_size_(group_->getSize()),
        options_(options),
        memory_(data_->memory_of(bucket)),
        gradients_(bucket.buffer()),
        is_last_(bucket.is_last()) {}

  // One of these two, then start().
  void take_gradients(const GradBucket& bucket);
  void take_all_as_one();

  /// Starts the first sum; this object lives until the last callback has run.
  HookFuture start();

 private:
  /// A batch of gradients of one shape, or a single one: batch×n×m.
  struct Matrices {
    at::Tensor m;
    std::vector<at::Tensor> targets;  // where the result goes: n×m each
    at::Tensor p, q;                  // batch×n×r, batch×m×r
  };

  at::TensorOptions dtype() const { return gradients_.options(); }
  int64_t rank_of(int64_t rows, int64_t columns) const {
    return std::min({rows, columns, options_.matrix_approximation_rank});
  }
  at::Tensor with_error(int64_t length);
  void place_factors();
  void fill_qs();
  void compute_ps();
  void use_on_current_stream() const;
  void finish_uncompressed();
  void compute_qs();
  void decompress();
  at::Tensor finish();

  std::shared_ptr<Data> data_;
  ProcessGroup group_;
  const int world_size_;
  const PowerSGDOptions options_;
  Data::Memory& memory_;
  const at::Tensor gradients_;
  const bool is_last_;

  at::Tensor m_;       // flat: the gradients plus the error; what is to be compressed
  at::Tensor result_;  // flat, as long as m_: what comes out; the bucket's buffer where that is long enough
  std::vector<at::Tensor> uncompressed_;  // of m_
  std::vector<at::Tensor> uncompressed_targets_;
  std::vector<Matrices> matrices_;
  at::Tensor exchange_;  // uncompressed gradients, then the Ps
  at::Tensor ps_, qs_;   // flat
  bool new_qs_ = false;
};

/// The gradients plus the last error, filled up with zeros to `length`, in memory that the next error may
/// have. The bucket itself is left as it is.
at::Tensor Compression::with_error(int64_t length) {
  const int64_t numel = gradients_.numel();
  if (!options_.use_error_feedback && length == numel) return gradients_;
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.numel() == length && tensor.scalar_type() == gradients_.scalar_type();
  };
  if (memory_.error.defined() && !fits(memory_.error)) memory_.error.reset();  // the buckets have changed
  if (!fits(memory_.spare)) {
    LOCKSTEP_LOG(kInfo) << "A tensor of length " << length << " that represents local error is created.";
    memory_.spare = at::empty({length}, dtype());
  }
  const at::Tensor sum = memory_.spare;
  at::Tensor front = sum.narrow(0, 0, numel);
  const at::Tensor padding = sum.narrow(0, numel, length - numel);
  if (memory_.error.defined()) {
    at::add_out(front, gradients_, memory_.error.narrow(0, 0, numel));
    padding.copy_(memory_.error.narrow(0, numel, length - numel));
  } else {
    front.copy_(gradients_);
    padding.zero_();
  }
  return sum;
}

/// Sorts the gradients: those to be compressed by shape, in the order in which shapes first appear, which is
/// also that of the random numbers.
void Compression::take_gradients(const GradBucket& bucket) {
  m_ = with_error(gradients_.numel());
  result_ = gradients_;
  struct Shape {
    int64_t rows, columns;
    std::vector<at::Tensor> sources, targets;
  };
  std::vector<Shape> shapes;
  int64_t before = 0, after = 0;
  const auto sources = GradBucket(bucket.index(), m_, bucket.parameters(), is_last_).gradients();
  const auto targets = bucket.gradients();
  for (size_t i = 0; i < sources.size(); ++i) {
    const int64_t numel = sources[i].numel();
    const int64_t rows = sources[i].dim() > 0 ? sources[i].size(0) : 1;
    const int64_t columns = rows > 0 ? numel / rows : 0;
    const int64_t rank = rank_of(rows, columns);
    before += numel;
    if (!hooks::internal::should_compress(rows, columns, rank, options_.min_compression_rate)) {
      after += numel;
      uncompressed_.push_back(sources[i].view(-1));
      uncompressed_targets_.push_back(targets[i].view(-1));
      continue;
    }
    after += (rows + columns) * rank;
    auto shape = std::find_if(shapes.begin(), shapes.end(), [&](const Shape& other) {
      return other.rows == rows && other.columns == columns;
    });
    if (shape == shapes.end()) shape = shapes.insert(shape, {rows, columns, {}, {}});
    shape->sources.push_back(sources[i].view({rows, columns}));
    shape->targets.push_back(targets[i].view({rows, columns}));
  }
  for (Shape& shape : shapes) {
    if (options_.batch_tensors_with_same_shape && shape.sources.size() > 1) {
      matrices_.push_back({at::stack(shape.sources), std::move(shape.targets), {}, {}});
    } else {
      for (size_t i = 0; i < shape.sources.size(); ++i) {
        matrices_.push_back({shape.sources[i].unsqueeze(0), {shape.targets[i]}, {}, {}});
      }
    }
  }
  data_->count(before, after, is_last_);
}

void Compression::take_all_as_one() {
  const int64_t numel = gradients_.numel();
  const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(numel))));
  m_ = with_error(side * side);
  if (numel == side * side) {
    result_ = gradients_;
  } else if (!options_.use_error_feedback) {
    result_ = m_;
  } else {
    // The last error is in m_ already; it becomes the next iteration's spare memory.
    if (!memory_.error.defined()) memory_.error = at::zeros_like(m_);
    result_ = memory_.error;
  }
  data_->count(numel, 2 * side * rank_of(side, side), is_last_);
  if (numel > 0) matrices_.push_back({m_.view({1, side, side}), {result_.view({side, side})}, {}, {}});
}

/// Gives the Ps and Qs their places in flat tensors, the Qs those of the last iteration if they are warm.
void Compression::place_factors() {
  int64_t uncompressed = 0, ps = 0, qs = 0;
  for (const at::Tensor& gradient : uncompressed_) uncompressed += gradient.numel();
  for (const Matrices& group : matrices_) {
    const int64_t rank = rank_of(group.m.size(1), group.m.size(2));
    ps += group.m.size(0) * group.m.size(1) * rank;
    qs += group.m.size(0) * group.m.size(2) * rank;
  }
  const bool warm = options_.warm_start && memory_.q.defined() && memory_.q.numel() == qs &&
                    memory_.q.scalar_type() == gradients_.scalar_type();
  new_qs_ = !warm;
  qs_ = warm ? memory_.q : hooks::internal::empty_for_exchange(qs, dtype(), group_);
  memory_.p.reset();  // so that its memory can be had again
  exchange_ = hooks::internal::empty_for_exchange(uncompressed + ps, dtype(), group_);
  ps_ = exchange_.narrow(0, uncompressed, ps);
  if (new_qs_ && options_.warm_start) {
    LOCKSTEP_LOG(kInfo) << "Allocating contiguous memory of length " << ps << " for Ps, and of length " << qs
                        << " for Qs, respectively.";
  }
  int64_t next_p = 0, next_q = 0;
  for (Matrices& group : matrices_) {
    const int64_t batch = group.m.size(0), rows = group.m.size(1), columns = group.m.size(2);
    const int64_t rank = rank_of(rows, columns);
    group.p = ps_.narrow(0, next_p, batch * rows * rank).view({batch, rows, rank});
    group.q = qs_.narrow(0, next_q, batch * columns * rank).view({batch, columns, rank});
    next_p += group.p.numel();
    next_q += group.q.numel();
  }
}

void Compression::fill_qs() {
  if (new_qs_) {
    std::unique_lock lock(data_->mutex);
    at::Generator generator =
        hooks::internal::next_generator(data_->random);  // also if there is no Q, as PyTorch does
    lock.unlock();
    for (const Matrices& group : matrices_) {
      if (group.q.is_cpu()) {
        group.q.normal_(0, 1, generator);
      } else {  // a device refuses the CPU's generator, with which PyTorch draws them, too
        group.q.copy_(at::empty(group.q.sizes(), dtype().device(at::kCPU)).normal_(0, 1, generator));
      }
    }
  }
  for (const Matrices& group : matrices_)
    hooks::internal::orthogonalize(group.q, options_.orthogonalization_epsilon);
}

void Compression::compute_ps() {
  for (Matrices& group : matrices_) at::bmm_out(group.p, group.m, group.q);
  int64_t next = 0;
  for (const at::Tensor& gradient : uncompressed_) {
    exchange_.narrow(0, next, gradient.numel()).copy_(gradient);
    next += gradient.numel();
  }
}

/// Callbacks run on streams of the pool, which know of the future's value alone.
void Compression::use_on_current_stream() const {
  for (const at::Tensor& tensor : {gradients_, m_, result_, exchange_, qs_}) {
    lockstep::use_on_current_stream(tensor);
  }
  for (const Matrices& group : matrices_) lockstep::use_on_current_stream(group.m);  // may be a copy
}

void Compression::finish_uncompressed() {
  int64_t next = 0;
  for (const at::Tensor& target : uncompressed_targets_) {
    target.copy_(exchange_.narrow(0, next, target.numel()).div_(world_size_));
    next += target.numel();
  }
}

void Compression::compute_qs() {
  for (Matrices& group : matrices_) {
    hooks::internal::orthogonalize(group.p, options_.orthogonalization_epsilon);
    at::bmm_out(group.q, group.m.transpose(1, 2), group.p);
  }
}

void Compression::decompress() {
  qs_.div_(world_size_);
  for (const Matrices& group : matrices_) {
    const at::Tensor q = group.q.transpose(1, 2);
    if (group.targets.size() == 1) {
      at::Tensor target = group.targets.front().unsqueeze(0);
      at::bmm_out(target, group.p, q);
    } else {
      const at::Tensor products = at::bmm(group.p, q);
      for (size_t i = 0; i < group.targets.size(); ++i) group.targets[i].copy_(products[i]);
    }
  }
}

/// The last thing that happens to a bucket: from here on nothing can fail.
at::Tensor Compression::finish() {
  decompress();
  if (!result_.is_same(gradients_)) gradients_.copy_(result_.narrow(0, 0, gradients_.numel()));
  if (options_.use_error_feedback) {
    m_.sub_(result_);
    std::swap(memory_.error, memory_.spare);  // m_ is the spare one
  }
  if (options_.warm_start) {
    memory_.p = ps_;
    memory_.q = qs_;
  }
  data_->maybe_increase_iter(is_last_);
  return gradients_;
}

HookFuture Compression::start() {
  place_factors();
  fill_qs();
  compute_ps();
  // Sizes are the same on all ranks, so all leave out the same sums.
  auto turn = qs_.numel() > 0 ? data_->order.take_turn(group_) : nullptr;
  auto first = exchange_.numel() > 0 ? hooks::internal::sum(exchange_, group_) : completed_future(exchange_);
  auto self = shared_from_this();
  return first->thenAsync(
      [self, turn = std::move(turn)](c10::ivalue::Future& done) mutable -> HookFuture {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        const hooks::internal::CallbackScope scope;
        self->use_on_current_stream();
        self->finish_uncompressed();
        if (!turn) return completed_future(self->finish());
        self->compute_qs();
        turn->wait();
        auto second = hooks::internal::sum(self->qs_, turn->group());
        turn.reset();
        return then(second, [self](const at::Tensor&) {
          const hooks::internal::CallbackScope second_scope;
          self->use_on_current_stream();
          return self->finish();
        });
      },
      c10::TensorType::get());
}

/// Averages as it is until compression begins; `take`: what a compression does with the bucket.
HookFuture average_or_compress(const PowerSGDState& state, GradBucket& bucket,
                               const std::function<void(Compression&)>& take) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(bucket.buffer().layout() == c10::kStrided, "PowerSGD takes dense gradients; bucket ",
                    bucket.index(), " is ", bucket.buffer().layout());
  const PowerSGDOptions options = state.options();
  const ProcessGroup chosen = state.process_group();
  const ProcessGroup group = chosen ? chosen : default_group();
  if (state.iter() < options.start_powerSGD_iter) {
    state.data()->maybe_increase_iter(bucket.is_last());
    return hooks::internal::average(group, bucket.buffer());
  }
  const auto compression = std::make_shared<Compression>(state.data(), group, options, bucket);
  take(*compression);
  return compression->start();
}

}  // namespace

HookFuture powerSGD_hook(const PowerSGDState& state, GradBucket& bucket) {
  return average_or_compress(state, bucket,
                             [&](Compression& compression) { compression.take_gradients(bucket); });
}

HookFuture batched_powerSGD_hook(const PowerSGDState& state, GradBucket& bucket) {
  return average_or_compress(state, bucket, [](Compression& compression) { compression.take_all_as_one(); });
}

}  // namespace lockstep

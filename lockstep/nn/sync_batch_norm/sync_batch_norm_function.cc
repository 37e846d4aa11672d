#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm_function.h>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a call takes besides the tensors that have gradients.
struct Settings {
  at::Tensor running_mean;
  at::Tensor running_var;
  double eps;
  double momentum;
  ProcessGroup group;
};

/// Mean and variance (biased) per channel, and the number of values per channel.
struct Statistics {
  at::Tensor mean;
  at::Tensor var;
  double count;
};

at::ScalarType statistics_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// (C) as (1, C, 1, …), to go with an input.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> sizes(input.dim(), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dimensions{0};
  for (int64_t dimension = 2; dimension < input.dim(); ++dimension) dimensions.push_back(dimension);
  return dimensions;
}

at::Tensor gather(const at::Tensor& mine, const ProcessGroup& group) {
  at::Tensor all = at::empty({group->getSize(), mine.numel()}, mine.options());
  at::Tensor input = mine;
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  const CallSite site("SyncBatchNorm");
  group->getBackend(mine.device().type())->_allgather_base(all, input, options)->wait();
  return all;
}

void sum_over_ranks(const at::Tensor& tensor, const ProcessGroup& group) {
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const CallSite site("SyncBatchNorm");
  group->getBackend(tensor.device().type())->allreduce(tensors, options)->wait();
}

/// This rank's mean, variance and count as one row.
at::Tensor local_statistics(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  const auto options = input.options().dtype(statistics_type(input));
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, options);
  // On the CPU the statistics of a half-precision input are float32 only if running statistics are.
  at::Tensor unused_mean;
  at::Tensor unused_var;
  if (input.scalar_type() != statistics_type(input)) {
    unused_mean = at::zeros({channels}, options);
    unused_var = at::zeros({channels}, options);
  }
  const auto [mean, var] = at::batch_norm_update_stats(input, unused_mean, unused_var, /*momentum=*/0);
  return at::cat({mean, var, at::full({1}, input.numel() / channels, options)});
}

/// The statistics of all values from those of the ranks, `rows`: (ranks, 2C + 1). Ranks without values count
/// for nothing.
Statistics combine(const at::Tensor& rows) {
  const at::Tensor exact = rows.to(at::kDouble);
  const int64_t channels = rows.size(1) / 2;
  const at::Tensor means = exact.narrow(1, 0, channels);
  const at::Tensor counts = exact.narrow(1, 2 * channels, 1);
  const double count = counts.sum().item<double>();
  const at::Tensor shares = counts / std::max(count, 1.0);
  const at::Tensor mean = (means * shares).sum(0);
  const at::Tensor var = ((exact.narrow(1, channels, channels) + (means - mean).square()) * shares).sum(0);
  return {mean, var, count};
}

void update_running(const Settings& settings, const Statistics& statistics) {
  if (!settings.running_mean.defined()) return;
  const auto update = [&](const at::Tensor& running, const at::Tensor& value) {
    running.copy_(running.to(at::kDouble) * (1 - settings.momentum) + value * settings.momentum);
  };
  update(settings.running_mean, statistics.mean);
  update(settings.running_var, statistics.var * (statistics.count / (statistics.count - 1)));
}

/// The loop of input_gradient(): operands are dx, dy, x, and per channel mean, mean_dy, slope, scale.
template <class scalar_t>
void input_gradient_loop(at::TensorIteratorBase& operands) {
  using number = at::opmath_type<scalar_t>;
  operands.for_each([](char** data, const int64_t* strides, int64_t n) {
    const auto one = [](scalar_t dy, scalar_t x, number mean, number mean_dy, number slope, number scale) {
      return static_cast<scalar_t>(
          ((static_cast<number>(dy) - mean_dy) - (static_cast<number>(x) - mean) * slope) * scale);
    };
    const auto all_strides = [&](int first, int last, int64_t stride) {
      return std::all_of(strides + first, strides + last, [&](int64_t value) { return value == stride; });
    };
    auto* dx = reinterpret_cast<scalar_t*>(data[0]);
    const auto* dy = reinterpret_cast<const scalar_t*>(data[1]);
    const auto* x = reinterpret_cast<const scalar_t*>(data[2]);
    const std::array<const number*, 4> c{
        reinterpret_cast<const number*>(data[3]), reinterpret_cast<const number*>(data[4]),
        reinterpret_cast<const number*>(data[5]), reinterpret_cast<const number*>(data[6])};
    const bool dense = all_strides(0, 3, sizeof(scalar_t));
    if (dense && all_strides(3, 7, 0)) {  // values of one channel
      const number mean = *c[0], mean_dy = *c[1], slope = *c[2], scale = *c[3];
      for (int64_t i = 0; i < n; ++i) dx[i] = one(dy[i], x[i], mean, mean_dy, slope, scale);
    } else if (dense && all_strides(3, 7, sizeof(number))) {  // a row of channels
      for (int64_t i = 0; i < n; ++i) dx[i] = one(dy[i], x[i], c[0][i], c[1][i], c[2][i], c[3][i]);
    } else {
      const auto at = [&](int operand, int64_t i) { return data[operand] + i * strides[operand]; };
      const auto value = [&](int operand, int64_t i) {
        return *reinterpret_cast<const number*>(at(operand, i));
      };
      for (int64_t i = 0; i < n; ++i) {
        *reinterpret_cast<scalar_t*>(at(0, i)) =
            one(*reinterpret_cast<const scalar_t*>(at(1, i)), *reinterpret_cast<const scalar_t*>(at(2, i)),
                value(3, i), value(4, i), value(5, i), value(6, i));
      }
    }
  });
}

/// ((dy − mean_dy) − (x − mean)·slope)·scale, all but the first two per channel; one pass on the CPU.
at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                          const at::Tensor& mean_dy, const at::Tensor& slope, const at::Tensor& scale) {
  if (!x.device().is_cpu()) {
    const at::Tensor centred = (x - per_channel(mean, x)) * per_channel(slope, x);
    return ((dy - per_channel(mean_dy, x) - centred) * per_channel(scale, x)).to(x.scalar_type());
  }
  at::Tensor dx = at::empty_like(x);
  auto operands = at::TensorIteratorConfig()
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .add_owned_output(dx)
                      .add_owned_const_input(dy)
                      .add_owned_const_input(x)
                      .add_owned_const_input(per_channel(mean, x))
                      .add_owned_const_input(per_channel(mean_dy, x))
                      .add_owned_const_input(per_channel(slope, x))
                      .add_owned_const_input(per_channel(scale, x))
                      .build();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "sync_batch_norm_backward",
                                  [&] { input_gradient_loop<scalar_t>(operands); });
  return dx;
}

/// The sum over ranks, for which a gradient is again the sum over ranks.
struct DifferentiableSum : torch::autograd::Function<DifferentiableSum> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const ProcessGroup& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
    sum_over_ranks(sum, group);
    return sum;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

ProcessGroup saved_group(AutogradContext* context) {
  return c10::dynamic_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
}

variable_list DifferentiableSum::backward(AutogradContext* context, const variable_list& gradients) {
  return {DifferentiableSum::apply(gradients[0], saved_group(context)), at::Tensor()};
}

/// The gradients of input, weight and bias made of operations that autograd follows: for backward passes that
/// are themselves differentiated. Slower than Function::backward, and the same numbers.
variable_list differentiable_gradients(const at::Tensor& dy, const at::Tensor& input,
                                       const at::Tensor& weight, double count, double eps,
                                       const ProcessGroup& group) {
  const auto dimensions = all_but_channels(input);
  const auto type = statistics_type(input);
  const at::Tensor x = input.to(type);
  const at::Tensor g = dy.to(type);
  const auto mean_over_all = [&](const at::Tensor& values) {
    return DifferentiableSum::apply(values.sum(dimensions), group) / count;
  };
  const at::Tensor centred = x - per_channel(mean_over_all(x), x);
  const at::Tensor invstd = (mean_over_all(centred.square()) + eps).rsqrt();
  const at::Tensor normal = centred * per_channel(invstd, x);
  const at::Tensor scale = weight.defined() ? invstd * weight.to(type) : invstd;
  const at::Tensor dx =
      (g - per_channel(mean_over_all(g), x) - normal * per_channel(mean_over_all(g * normal), x)) *
      per_channel(scale, x);
  return {dx.to(input.scalar_type()), (g * normal).sum(dimensions), g.sum(dimensions)};
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                            const Settings& settings) {
    const Statistics statistics = combine(gather(local_statistics(input), settings.group));
    TORCH_CHECK_VALUE(statistics.count != 1,
                      "Expected more than 1 value per channel when training, got input size ", input.sizes(),
                      " here and no more on the other ranks; give the ranks larger batches");
    if (statistics.count > 0) update_running(settings, statistics);
    const auto type = statistics_type(input);
    const at::Tensor mean = statistics.mean.to(type);
    const at::Tensor var = statistics.var.to(type);
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, var});
    context->saved_data["count"] = statistics.count;
    context->saved_data["eps"] = settings.eps;
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["group"] = c10::IValue::make_capsule(settings.group);
    if (input.numel() == 0) return at::empty_like(input);
    const auto as_statistics = [&](const std::optional<at::Tensor>& parameter) {
      return parameter ? parameter->to(type) : at::Tensor();
    };
    // With given statistics that is one pass: y = a·x + b.
    return std::get<0>(at::native_batch_norm(input, as_statistics(weight), as_statistics(bias), mean, var,
                                             /*training=*/false, /*momentum=*/0, settings.eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &var = saved[3];
    const ProcessGroup group = saved_group(context);
    const double count = context->saved_data["count"].toDouble();
    const double eps = context->saved_data["eps"].toDouble();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const auto format = input.suggest_memory_format();

    variable_list answer;  // of input, weight and bias
    if (at::GradMode::is_enabled()) {
      answer = differentiable_gradients(gradients[0], input, weight, std::max(count, 1.0), eps, group);
    } else {
      const int64_t channels = input.size(1);
      const at::Tensor dy = gradients[0].contiguous(format);
      const at::Tensor invstd = at::rsqrt(var + eps);
      at::Tensor sum_dy_normal;  // Σ dy·(x − mean)·invstd
      at::Tensor sum_dy;
      if (input.numel() == 0) {
        sum_dy_normal = at::zeros({channels}, mean.options());
        sum_dy = at::zeros({channels}, mean.options());
      } else {
        // Of the weight only the type is looked at.
        std::tie(std::ignore, sum_dy_normal, sum_dy) = at::native_batch_norm_backward(
            dy, input, weight.defined() ? weight.to(mean.scalar_type()) : mean, mean, var, mean, invstd,
            /*train=*/false, eps, {false, true, true});
      }
      at::Tensor dx;
      if (context->needs_input_grad(0)) {
        const at::Tensor sums = at::cat({sum_dy, sum_dy_normal});
        sum_over_ranks(sums, group);
        sums.div_(std::max(count, 1.0));
        const at::Tensor scale = weight.defined() ? invstd * weight.to(mean.scalar_type()) : invstd;
        dx = input_gradient(dy, input, mean, sums.narrow(0, 0, channels),
                            sums.narrow(0, channels, channels) * invstd, scale);
      }
      answer = {dx, sum_dy_normal, sum_dy};
    }
    return {answer[0], weight.defined() ? answer[1] : at::Tensor(), has_bias ? answer[2] : at::Tensor(),
            at::Tensor()};
  }
};

void check_parameter(const at::Tensor& values, const char* name, int64_t channels) {
  TORCH_CHECK_VALUE(!values.defined() || values.numel() == channels, name, " should contain ", channels,
                    " elements not ", values.defined() ? values.numel() : 0);
}

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace

ProcessGroup sync_batch_norm_group(const ProcessGroup& process_group) {
  if (!is_initialized()) return {};
  TORCH_CHECK_VALUE(is_member(process_group),
                    "SyncBatchNorm: this rank is not in its process group; give each rank a group that it is "
                    "a member of");
  ProcessGroup group = process_group ? process_group : default_group();
  return group->getSize() > 1 ? group : ProcessGroup();
}

at::Tensor sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                           const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                           double momentum, const ProcessGroup& process_group) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "expected at least 2D input (got ", input.dim(), "D input)");
  const int64_t channels = input.size(1);
  TORCH_CHECK_VALUE(channels > 0, "SyncBatchNorm number of input channels should be non-zero");
  TORCH_CHECK_VALUE(at::isFloatingType(input.scalar_type()),
                    "SyncBatchNorm: the input must be of a floating-point type; it is ", input.scalar_type());
  TORCH_CHECK_VALUE(running_mean.defined() == running_var.defined(),
                    "SyncBatchNorm: give both of running_mean and running_var, or neither");
  check_parameter(weight, "weight", channels);
  check_parameter(bias, "bias", channels);
  check_parameter(running_mean, "running_mean", channels);
  check_parameter(running_var, "running_var", channels);
  TORCH_CHECK_VALUE(is_member(process_group), "SyncBatchNorm: this rank is not in the process group");
  const ProcessGroup group = process_group ? process_group : default_group();
  if (group->getSize() == 1) {
    TORCH_CHECK_VALUE(input.numel() != channels,
                      "Expected more than 1 value per channel when training, got input size ", input.sizes());
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, /*training=*/true, momentum,
                                  eps, at::globalContext().userEnabledCuDNN());
  }
  // A copy only where the values don't lie in a known order, and outside of the function, so that a second
  // differentiation finds the way through it.
  return SyncBatchNormFunction::apply(input.contiguous(input.suggest_memory_format()), if_defined(weight),
                                      if_defined(bias),
                                      Settings{running_mean, running_var, eps, momentum, group});
}

}  // namespace lockstep

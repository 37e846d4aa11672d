#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/aminmax.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/hooks/internal/hook_operations.h>
#include <lockstep/parallel/ddp/hooks/quantization_hooks.h>

namespace lockstep {
namespace {

constexpr int64_t kGrain = 32 * 1024;  // elements, for at::parallel_for
constexpr int64_t kBlock = 1024;       // elements that are summed over the ranks at a time

/// How a channel's elements x become bytes: q = round(x / scale) + zero_point.
struct Affine {
  float scale;
  float zero_point;
};

/// What a rank sends: an Affine for each channel, then a byte for each element.
struct Layout {
  int64_t elements;
  int64_t channel_size;

  int64_t channels() const { return (elements + channel_size - 1) / channel_size; }
  int64_t affines_bytes() const { return channels() * static_cast<int64_t>(sizeof(Affine)); }
  /// Rounded up, so that every rank's part is aligned.
  int64_t bytes() const { return affines_bytes() + (elements + 7) / 8 * 8; }

  /// Calls action(channel, begin, end) for the pieces of [begin, end) that lie in one channel and have at
  /// most kBlock elements.
  template <class Action>
  void for_each_block(int64_t begin, int64_t end, const Action& action) const {
    while (begin < end) {
      const int64_t channel = begin / channel_size;
      const int64_t stop = std::min({end, (channel + 1) * channel_size, begin + kBlock});
      action(channel, begin, stop);
      begin = stop;
    }
  }
};

struct Message {
  Affine* affines;
  uint8_t* bytes;

  Message(const Layout& layout, const at::Tensor& messages, int rank) {
    auto* begin = messages.mutable_data_ptr<uint8_t>() + rank * layout.bytes();
    affines = reinterpret_cast<Affine*>(begin);
    bytes = begin + layout.affines_bytes();
  }
};

/// torch.ao.quantization's MinMaxObserver for quint8: the range is made to hold 0, which has an exact byte.
Affine affine_of(float low, float high) {
  const float below = std::min(low, 0.F);  // a NaN stays one in these
  const float above = std::max(high, 0.F);
  float scale = (above - below) / 255.F;
  if (scale < std::numeric_limits<float>::epsilon()) scale = std::numeric_limits<float>::epsilon();
  const float zero_point = 0.F - std::nearbyint(below / scale);
  return {scale, zero_point > 0 ? std::min(zero_point, 255.F) : 0.F};
}

void choose_affines(const Layout& layout, const at::Tensor& elements, Affine* affines) {
  const int64_t whole = layout.elements / layout.channel_size;
  const auto choose = [&](const at::Tensor& channels, Affine* to) {
    auto [low, high] = at::aminmax(channels, 1);
    low = low.to(at::kFloat);
    high = high.to(at::kFloat);
    for (int64_t i = 0; i < channels.size(0); ++i) {
      to[i] = affine_of(low.const_data_ptr<float>()[i], high.const_data_ptr<float>()[i]);
    }
  };
  const int64_t covered = whole * layout.channel_size;
  if (whole > 0) choose(elements.narrow(0, 0, covered).view({whole, layout.channel_size}), affines);
  if (covered < layout.elements) {
    choose(elements.narrow(0, covered, layout.elements - covered).unsqueeze(0), affines + whole);
  }
}

/// Rounds |x| < 2^22 (2^51 for double) to the next integer, halves to even: what does not fit after the
/// point of such a large number is rounded off. Unlike std::nearbyint it becomes vector instructions
/// everywhere.
template <class Real>
Real rounded(Real x) {
  constexpr Real kLarge = std::numeric_limits<Real>::digits == 24 ? Real(3 << 22) : Real(3LL << 51);
  return (x + kLarge) - kLarge;
}

template <class Real>
void quantise(const Layout& layout, const Real* elements, const Message& message) {
  at::parallel_for(0, layout.elements, kGrain, [&](int64_t first, int64_t last) {
    layout.for_each_block(first, last, [&](int64_t channel, int64_t begin, int64_t end) {
      const Real scale = message.affines[channel].scale;
      const Real zero_point = message.affines[channel].zero_point;
      for (int64_t i = begin; i < end; ++i) {
        const Real value = rounded(elements[i] / scale) + zero_point;
        const Real positive = value > 0 ? value : 0;  // a NaN gives 0; its scale is NaN, too
        message.bytes[i] = static_cast<uint8_t>(positive < 255 ? positive : 255);
      }
    });
  });
}

/// The mean of all ranks' messages, added up in rank order: the same bits everywhere.
template <class Real>
void average(const Layout& layout, const at::Tensor& messages, int ranks, Real* result) {
  at::parallel_for(0, layout.elements, kGrain, [&](int64_t first, int64_t last) {
    std::array<float, kBlock> sum{};
    layout.for_each_block(first, last, [&](int64_t channel, int64_t begin, int64_t end) {
      std::fill_n(sum.begin(), end - begin, 0.F);
      for (int rank = 0; rank < ranks; ++rank) {
        const Message message(layout, messages, rank);
        const Affine affine = message.affines[channel];
        const uint8_t* bytes = message.bytes + begin;
        for (int64_t i = 0; i < end - begin; ++i) {
          sum[i] += affine.scale * (static_cast<float>(bytes[i]) - affine.zero_point);
        }
      }
      for (int64_t i = 0; i < end - begin; ++i) {
        result[begin + i] = static_cast<Real>(sum[i] / static_cast<float>(ranks));
      }
    });
  });
}

HookFuture quantised_average(const ProcessGroup& group, const GradBucket& bucket, int64_t channel_size) {
  const at::NoGradGuard no_grad;
  const at::Tensor buffer = bucket.buffer();
  TORCH_CHECK_VALUE(buffer.layout() == c10::kStrided && at::isFloatingType(buffer.scalar_type()),
                    "the quantization hooks take dense gradients of a floating dtype; bucket ",
                    bucket.index(), " is ", buffer.layout(), ' ', buffer.scalar_type());
  if (buffer.numel() == 0) return completed_future(buffer);
  const bool is_wide = buffer.scalar_type() == at::kFloat || buffer.scalar_type() == at::kDouble;
  const bool direct = is_wide && buffer.is_cpu();
  // A device's bucket is quantised on the host: both copies wait for the device, so nothing else needs an
  // order.
  const at::Tensor elements =
      direct ? buffer : buffer.to(at::kCPU, is_wide ? buffer.scalar_type() : at::kFloat);
  const Layout layout{buffer.numel(), channel_size};
  const int ranks = get_world_size(group);
  const at::Tensor message = hooks::internal::empty_for_exchange(layout.bytes(), at::kByte, group);
  const at::Tensor messages = hooks::internal::empty_for_exchange(layout.bytes() * ranks, at::kByte, group);
  const Message mine(layout, message, 0);
  choose_affines(layout, elements, mine.affines);
  AT_DISPATCH_FLOATING_TYPES(elements.scalar_type(), "quantization hook",
                             [&] { quantise(layout, elements.const_data_ptr<scalar_t>(), mine); });
  auto gathered = all_gather_into_tensor(messages, message, group, /*async_op=*/true)->getFuture();
  return then(gathered, [=](const at::Tensor&) {
    const hooks::internal::CallbackScope scope;
    AT_DISPATCH_FLOATING_TYPES(elements.scalar_type(), "quantization hook", [&] {
      average(layout, messages, ranks, elements.mutable_data_ptr<scalar_t>());
    });
    return direct ? buffer : buffer.copy_(elements);
  });
}

}  // namespace

HookFuture quantization_pertensor_hook(const ProcessGroup& process_group, GradBucket& bucket) {
  return quantised_average(process_group, bucket, std::max<int64_t>(bucket.buffer().numel(), 1));
}

HookFuture QuantizationPerChannelHook::operator()(const ProcessGroup& process_group, GradBucket& bucket,
                                                  int64_t channel_size) const {
  TORCH_CHECK_VALUE(channel_size > 0, "quantization_perchannel_hook: bucket_size is ", channel_size,
                    "; it must be at least 1");
  return quantised_average(process_group, bucket, channel_size);
}

}  // namespace lockstep

#include <algorithm>
#include <vector>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/offer.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms {
namespace {

using transport::GroupChannel;
using transport::HostChannel;
using Flag = HostChannel::Flag;

/// The rounds of one exchange, as all ranks see them.
class Rounds {
 public:
  Rounds(HostChannel& channel, const Exchange& exchange, const std::vector<Offer>& offers)
      : channel_(channel), exchange_(exchange), offers_(offers), buffers_(channel) {
    for (const Offer& offer : offers) any_staged_ |= offer.header().place == DataPlace::kStaged;
    if (!any_staged_) return;
    for (const Offer& offer : offers) {
      const size_t window = window_bytes(offer);
      for (int to = 0; to < channel.size(); ++to) {
        rounds_ = std::max(rounds_, (offer.bytes_for(to) + window - 1) / window);
      }
    }
  }

  /// That pass through the scratch, on any rank.
  size_t chunks() const { return any_staged_ ? rounds_ : 0; }

  void run(const Consume& consume) {
    const bool staging = offers_[channel_.rank()].header().place == DataPlace::kStaged;
    if (staging) stage(0);
    for (size_t k = 0; k < rounds_; ++k) {
      if (staging && k + 1 < rounds_) {
        // The buffer of chunk k+1 is free once all ranks have read chunk k−1 from it.
        if (k > 0) channel_.await_all(Flag::kReduced, buffers_.number(k - 1));
        stage(k + 1);
      }
      consume(windows(k));
      if (any_staged_) channel_.publish(Flag::kReduced, buffers_.number(k));
    }
  }

 private:
  /// The largest part of a piece that passes at once.
  size_t window_bytes(const Offer& offer) const {
    const size_t parts = offer.header().entries > 1 ? offers_.size() : 1;
    return buffers_.capacity() / parts / kCacheLine * kCacheLine;
  }
  size_t window_bytes(int from) const { return any_staged_ ? window_bytes(offers_[from]) : ~size_t{0} / 2; }
  /// Part k of what `from` gives to `to`.
  Window window(int from, int to, size_t k) const {
    return window_of(offers_[from].bytes_for(to), window_bytes(from), k);
  }

  void stage(size_t k) {
    std::byte* buffer = buffers_.own(k);
    const int own = channel_.rank();
    const bool for_all = exchange_.gives.size() == 1;
    for (int to = 0; to < (for_all ? 1 : channel_.size()); ++to) {
      if (to == own && !for_all) continue;
      const Window part = window(own, to, k);
      copy_bytes(buffer + to * window_bytes(own),
                 static_cast<const std::byte*>(exchange_.gives[to].data) + part.offset, part.bytes);
    }
    channel_.publish(Flag::kStaged, buffers_.number(k));
  }

  std::vector<Window> windows(size_t k) {
    const int own = channel_.rank();
    std::vector<Window> windows(channel_.size());
    for (int from = 0; from < channel_.size(); ++from) {
      if (exchange_.takes[from] == 0) continue;
      Window& part = windows[from] = window(from, own, k);
      if (part.bytes == 0) continue;
      const Offer& offer = offers_[from];
      if (from == own) {
        const Piece& piece = exchange_.gives[exchange_.gives.size() == 1 ? 0 : own];
        part.data = static_cast<const std::byte*>(piece.data) + part.offset;
      } else if (offer.header().place == DataPlace::kInline) {
        part.data = offer.inline_for(own) + part.offset;
      } else if (offer.header().place == DataPlace::kArena) {
        part.data = channel_.memory(from, offer.memory_for(own)) + part.offset;
      } else {
        channel_.await_rank(Flag::kStaged, from, buffers_.number(k));
        part.data = buffers_.of(from, k) + (offer.header().entries == 1 ? 0 : own * window_bytes(from));
      }
    }
    return windows;
  }

  HostChannel& channel_;
  const Exchange& exchange_;
  const std::vector<Offer>& offers_;
  DoubleBuffer buffers_;
  bool any_staged_ = false;
  size_t rounds_ = 1;
};

void exchange_on_host(HostChannel& channel, const Terms& terms, const Signature& signature,
                      const Exchange& exchange, const Consume& consume) {
  channel.begin(terms.deadline, terms.background);
  write_offer(channel, exchange);
  channel.announce(announcement_of(signature));
  channel.await_announcements();
  std::vector<Offer> offers;
  bool all_inline = true;
  for (int rank = 0; rank < channel.size(); ++rank) {
    offers.emplace_back(channel, rank);
    all_inline &= offers.back().header().place == DataPlace::kInline;
  }
  if (exchange.compare_sizes) compare_sizes(channel, offers);
  Rounds rounds(channel, exchange, offers);
  if (all_inline || channel.size() == 1) {
    // The announcements stay until the operation after the next is announced: success can be made final
    // first.
    channel.commit();
    return rounds.run(consume);
  }
  failpoint::here("exchange");
  rounds.run(consume);
  channel.add_chunks(rounds.chunks());
  finish(channel);
}

}  // namespace

void exchange(GroupChannel& channel, const Terms& terms, const Signature& signature, const Exchange& exchange,
              const Consume& consume) {
  if (channel.spans_hosts()) return hosts::exchange(channel, terms, signature, exchange, consume);
  exchange_on_host(channel.host(), terms, signature, exchange, consume);
}

Consume fold_into(const Signature& signature, void* output) {
  const ReduceKernels& kernels =
      reduce_kernels(signature.real_dtype(), static_cast<ReduceOperation>(signature.operation));
  return [&kernels, output](const std::vector<Window>& windows) {
    std::vector<const void*> inputs;
    for (const Window& window : windows) inputs.push_back(window.data);
    void* to = static_cast<std::byte*>(output) + windows.front().offset;
    const size_t count = windows.front().bytes / kernels.element_size;
    if (count > 0) kernels.reduce(&to, 1, inputs.data(), inputs.size(), count);
  };
}

void reduce_scatter(GroupChannel& channel, const Terms& terms, const Signature& signature,
                    const Exchange& exchange, void* output) {
  if (channel.spans_hosts()) return hosts::reduce_scatter(channel, terms, signature, exchange, output);
  exchange_on_host(channel.host(), terms, signature, exchange, fold_into(signature, output));
}

}  // namespace lockstep::collectives::internal::algorithms

#include <algorithm>

#include <lockstep/collectives/algorithms/hosts/small_exchange.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::HostChannel;

/// Offers stand on cache lines.
size_t room_for(const Offer& offer) {
  return whole_lines(offer.header().whole_bytes);
}

}  // namespace

bool SmallExchange::run(Agreement& agreement, const Signature& signature, size_t scratch_bytes,
                        const Consume& consume) {
  HostChannel& host = channel_.host();
  host.announce(announcement_of(signature));
  const size_t comparing = exchange_.compare_sizes ? Agreement::comparison_bytes(channel_) : 0;
  agreement.reach(signature, std::max(comparing, scratch_bytes), this);
  const auto all = offers(agreement.result());
  if (all.empty()) {
    if (exchange_.compare_sizes) agreement.compare_sizes(exchange_);
    return false;
  }
  if (exchange_.compare_sizes) compare_sizes(channel_, all);
  // The offers stay until the next operation is announced: success can be made final first.
  host.commit();
  consume(windows(all));
  return true;
}

// Pieces for one rank go to all hosts: of these a leader sends less, so that what the others receive in vain is no more
// than kHostBytes for each.
size_t SmallExchange::combine_host(void* part, HostChannel& host) const {
  auto* to = static_cast<std::byte*>(part);
  std::vector<Offer> whole;
  size_t bytes = 0;
  size_t most = kHostBytes;
  for (int place = 0; place < host.size(); ++place) {
    const Offer offer(host, place);
    if (offer.header().whole_bytes == 0) break;
    if (offer.header().entries > 1) most = kHostBytes / (channel_.layout().hosts.size() - 1);
    bytes += room_for(offer);
    whole.push_back(offer);
  }
  if (whole.size() < static_cast<size_t>(host.size()) || bytes > most) {
    *reinterpret_cast<Offer::Header*>(to) = {};
    return sizeof(Offer::Header);
  }
  for (const Offer& offer : whole) {
    copy_bytes(to, offer.data(), offer.header().whole_bytes);
    to += room_for(offer);
  }
  return bytes;
}

/// Where each host's offers begin; 0 in the first place if a host has sent none.
void SmallExchange::finish_hosts(void* result, const std::vector<const void*>& parts) const {
  auto* begins = static_cast<uint64_t*>(result);
  begins[0] = 0;
  if (parts.size() * sizeof(uint64_t) > HostChannel::kPayloadBytes) return;
  for (const void* part : parts) {
    if (Offer(part).header().whole_bytes == 0) return;
  }
  for (size_t host = 0; host < parts.size(); ++host) {
    begins[host] = static_cast<uint64_t>(static_cast<const std::byte*>(parts[host]) -
                                         static_cast<const std::byte*>(result));
  }
}

/// By rank; none if the exchange is not small.
std::vector<Offer> SmallExchange::offers(const std::byte* result) const {
  const auto* begins = reinterpret_cast<const uint64_t*>(result);
  if (begins[0] == 0) return {};
  const auto& hosts = channel_.layout().hosts;
  std::vector<Offer> all(channel_.size(), Offer(nullptr));
  for (size_t host = 0; host < hosts.size(); ++host) {
    const std::byte* at = result + begins[host];
    for (const int rank : hosts[host]) {
      all[rank] = Offer(at);
      at += room_for(all[rank]);
    }
  }
  return all;
}

std::vector<Window> SmallExchange::windows(const std::vector<Offer>& offers) const {
  std::vector<Window> windows(channel_.size());
  for (int from = 0; from < channel_.size(); ++from) {
    if (exchange_.takes[from] == 0) continue;
    windows[from] = {offers[from].inline_for(channel_.rank()), 0, exchange_.takes[from]};
  }
  return windows;
}

}  // namespace lockstep::collectives::internal::algorithms::hosts

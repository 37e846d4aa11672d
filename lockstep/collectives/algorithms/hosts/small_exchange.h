#pragma once

#include <cstddef>
#include <vector>

#include <lockstep/collectives/algorithms/hosts/agreement.h>
#include <lockstep/collectives/algorithms/offer.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// The beginning of each exchange, and the whole of a small one: whose data travel with the agreement, in one round
/// trip. Each leader sends the offers of its host, with the data; the members read all hosts' in its scratch. An
/// exchange is small if what each rank gives fits into its announcement (kPayloadBytes), and the announcements of each
/// host into what its leader sends (kHostBytes, less with a piece for each rank: combine_host()). Which it is the ranks
/// learn from the agreement, so that sizes may differ by rank.
class SmallExchange final : public AgreementPayload {
 public:
  /// Whether what this rank gives to all fits into its announcement: write_offer(GroupChannel&) then makes a whole one.
  static bool fits(const Exchange& exchange) {
    return offer_bytes(exchange) <= transport::HostChannel::kPayloadBytes;
  }
  SmallExchange(transport::GroupChannel& channel, const Exchange& exchange)
      : channel_(channel), exchange_(exchange) {}

  /// After write_offer(): announces, reaches the agreement, and compares sizes if they are to be. True if the exchange
  /// was small: it is committed then, and all is consumed. `scratch_bytes`: what it needs of this rank's otherwise.
  bool run(Agreement& agreement, const Signature& signature, size_t scratch_bytes, const Consume& consume);

  size_t combine_host(void* part, transport::HostChannel& host) const override;
  void finish_hosts(void* result, const std::vector<const void*>& parts) const override;

 private:
  std::vector<Offer> offers(const std::byte* result) const;
  std::vector<Window> windows(const std::vector<Offer>& offers) const;

  transport::GroupChannel& channel_;
  const Exchange& exchange_;
};

}  // namespace lockstep::collectives::internal::algorithms::hosts

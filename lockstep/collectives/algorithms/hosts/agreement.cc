#include <algorithm>
#include <array>
#include <vector>

#include <c10/util/StringUtil.h>

#include <lockstep/collectives/algorithms/hosts/agreement.h>
#include <lockstep/collectives/algorithms/hosts/leaders_gather.h>
#include <lockstep/collectives/algorithms/offer.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::HostChannel;
using Flag = HostChannel::Flag;

/// What a leader says for its host; the payload's part follows. As large as the largest on the way in: another host may
/// have called anything.
struct HostCall {
  uint64_t digest;
  std::array<std::byte, transport::layout::kDetailBytes> details;
  alignas(64) std::byte part[AgreementPayload::kHostBytes];
};

std::string text_of_calls(const Calls& calls) {
  return c10::str(transport::kDifferentOperations, ": ", calls.describe());
}

}  // namespace

void Agreement::reach(const Signature& signature, size_t scratch_bytes, const AgreementPayload* payload) {
  host_.await_announcements(payload == nullptr ? nullptr : payload->combiner(),
                            [&] { return text_of_calls(announced_calls(host_)); });
  if (leads())
    scratch_bytes = std::max(scratch_bytes, LeadersGather(channel_, sizeof(HostCall)).scratch_bytes());
  // Only now: the neighbours read the one of the operation before until they have announced this one.
  host_.scratch(sizeof(Answer) + scratch_bytes);
  if (leads()) write_answer(gather_calls(signature, payload));
  follow();
}

std::string Agreement::gather_calls(const Signature& signature, const AgreementPayload* payload) {
  LeadersGather gather(channel_, sizeof(HostCall));
  auto* own = reinterpret_cast<HostCall*>(gather.own(scratch()));
  const auto announced = announcement_of(signature);
  own->digest = announced.digest;
  own->details = announced.details;
  const size_t part_bytes = payload == nullptr ? 0 : payload->combine_host(own->part, host_);
  const auto blocks = gather.run(scratch(), offsetof(HostCall, part) + part_bytes);
  Calls calls;
  bool same = true;
  std::vector<const void*> parts;
  for (size_t host = 0; host < blocks.size(); ++host) {
    const auto* call = reinterpret_cast<const HostCall*>(blocks[host]);
    same &= call->digest == own->digest;
    parts.push_back(call->part);
  }
  if (same) {
    if (payload != nullptr) payload->finish_hosts(answer()->body, parts);
    return "";
  }
  for (size_t host = 0; host < blocks.size(); ++host) {
    std::vector<int> ranks;
    for (int rank : channel_.layout().hosts[host]) ranks.push_back(channel_.job_rank(rank));
    calls.add(reinterpret_cast<const HostCall*>(blocks[host])->details, ranks);
  }
  return text_of_calls(calls);
}

// The leader's flag counts as one chunk.
void Agreement::write_answer(const std::string& refusal) {
  Answer* own = answer();
  own->refusal_bytes = std::min(refusal.size(), sizeof(own->body));
  copy_bytes(own->body, refusal.data(), own->refusal_bytes);
  host_.publish(Flag::kReduced, host_.chunk_base() + 1);
}

void Agreement::follow() {
  host_.await_relay(Flag::kReduced, 0, host_.chunk_base() + 1);
  host_.add_chunks(1);
  const Answer* told = answer();
  if (told->refusal_bytes == 0) return;
  channel_.refuse({reinterpret_cast<const char*>(told->body), told->refusal_bytes});
}

// ---- sizes

namespace {

/// One pair of ranks whose sizes differ, the first one that a leader has found; ranks of the group.
struct Difference {
  uint64_t found;
  int32_t from;
  int32_t to;
  uint64_t given;
  uint64_t taken;

  bool is_before(const Difference& other) const {
    return found != 0 && (other.found == 0 || from < other.from || (from == other.from && to < other.to));
  }
};

/// Pairs of a member of one host with all members of the others.
size_t pairs_between(const transport::GroupLayout& layout) {
  return layout.neighbours().size() * (layout.size() - layout.neighbours().size());
}

}  // namespace

size_t Agreement::comparison_bytes(const transport::GroupChannel& channel) {
  const transport::GroupLayout& layout = channel.layout();
  // Own table: what this rank gives to each, and takes from each. A leader: the tables that it sends and receives.
  return (2 * layout.size() + (layout.place() == 0 ? 2 * pairs_between(layout) : 0)) * sizeof(uint64_t);
}

void Agreement::compare_sizes(const Exchange& exchange) {
  const size_t ranks = channel_.size();
  auto* table = reinterpret_cast<uint64_t*>(scratch());
  for (size_t rank = 0; rank < ranks; ++rank) {
    table[rank] = exchange.gives[rank].bytes;
    table[ranks + rank] = exchange.takes[rank];
  }
  host_.publish(Flag::kStaged, host_.chunk_base() + 1);
  if (leads()) write_answer(gather_sizes());
  follow();
}

std::string Agreement::gather_sizes() {
  const transport::GroupLayout& layout = channel_.layout();
  const std::vector<int>& neighbours = layout.neighbours();
  host_.await_all(Flag::kStaged, host_.chunk_base() + 1);
  std::vector<const uint64_t*> tables;  // by place
  for (int place = 0; place < host_.size(); ++place) {
    tables.push_back(reinterpret_cast<const uint64_t*>(scratch_of(place)));
  }
  // What the members of each other host give to those of this one, and the other way round; row: who gives.
  auto* outgoing = reinterpret_cast<uint64_t*>(scratch()) + 2 * layout.size();
  auto* incoming = outgoing + pairs_between(layout);
  std::vector<transport::wire::Handle> requests;
  std::vector<const uint64_t*> given(layout.hosts.size());
  for (size_t host = 0; host < layout.hosts.size(); ++host) {
    if (static_cast<int>(host) == layout.host()) continue;
    const size_t pairs = neighbours.size() * layout.hosts[host].size();
    given[host] = incoming;
    requests.push_back(channel_.receive(layout.hosts[host].front(), incoming, pairs * sizeof(uint64_t)));
    incoming += pairs;
  }
  for (size_t host = 0; host < layout.hosts.size(); ++host) {
    if (static_cast<int>(host) == layout.host()) continue;
    const uint64_t* begin = outgoing;
    for (const uint64_t* table : tables) {
      for (int to : layout.hosts[host]) *outgoing++ = table[to];
    }
    requests.push_back(channel_.send(layout.hosts[host].front(), begin,
                                     static_cast<size_t>(outgoing - begin) * sizeof(uint64_t)));
  }
  channel_.await(requests);

  Difference first{};
  for (int from = 0; from < layout.size() && first.found == 0; ++from) {
    const bool local = layout.host_of[from] == layout.host();
    for (size_t place = 0; place < neighbours.size() && first.found == 0; ++place) {
      const int to = neighbours[place];
      const uint64_t gives =
          local ? tables[layout.place_of[from]][to]
                : given[layout.host_of[from]][layout.place_of[from] * neighbours.size() + place];
      const uint64_t takes = tables[place][layout.size() + from];
      if (gives != takes) first = {1, from, to, gives, takes};
    }
  }
  // The tables may be overwritten now; the gather's scratch begins where they do.
  LeadersGather gather(channel_, sizeof(Difference));
  *reinterpret_cast<Difference*>(gather.own(scratch())) = first;
  for (const std::byte* block : gather.run(scratch(), sizeof(Difference))) {
    const auto& theirs = *reinterpret_cast<const Difference*>(block);
    if (theirs.is_before(first)) first = theirs;
  }
  return first.found == 0 ? ""
                          : describe_sizes(channel_.job_rank(first.from), first.given,
                                           channel_.job_rank(first.to), first.taken);
}

}  // namespace lockstep::collectives::internal::algorithms::hosts

#include <algorithm>
#include <map>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/collectives/groups/internal/backend_names.h>
#include <lockstep/collectives/groups/internal/device_agreement.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep::collectives::internal::device_agreement {
namespace {

constexpr size_t kRecordBytes = 2304;
constexpr size_t kLongestText = 250;      // of host, backend and identity
constexpr size_t kLongestProblem = 1000;  // of plain text

/// ASCII alone, so that nothing grows beyond the record.
std::string cut(std::string text, size_t longest) {
  if (text.size() > longest) text = text.substr(0, longest - 3) + "...";
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e || c == '"' || c == '\\'; },
      '\'');
  return text;
}

std::pair<std::string, std::string> host_of(const RankDevice& member) {
  return {member.host_identity, member.host};
}

/// "ranks 0 and 1: text; rank 2: other text", for the members that have one.
template <class Text>
std::string who_says_what(const std::vector<RankDevice>& members, const Text& text) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (const RankDevice& member : members) {
    const std::string mine = text(member);
    if (mine.empty()) continue;
    auto same =
        std::find_if(groups.begin(), groups.end(), [&](const auto& one) { return one.first == mine; });
    if (same == groups.end()) same = groups.insert(groups.end(), {mine, {}});
    same->second.push_back(member.rank);
  }
  std::string all;
  for (const auto& [what, ranks] : groups) all += (all.empty() ? "" : "; ") + name_ranks(ranks) + ": " + what;
  return all;
}

/// "ranks 0 and 1 share the card GPU-8a5c"; empty when no ranks share one.
std::string who_shares(const std::vector<RankDevice>& members) {
  std::map<std::pair<std::pair<std::string, std::string>, std::string>, std::vector<int>> ranks_of;
  for (const RankDevice& member : members) {
    if (!member.card.empty()) ranks_of[{host_of(member), member.card}].push_back(member.rank);
  }
  std::string all;
  for (const auto& [card, ranks] : ranks_of) {
    if (ranks.size() < 2) continue;
    all += (all.empty() ? "" : "; ") + name_ranks(ranks) + " share the card " + card.second + " on host " +
           card.first.second;
  }
  return all;
}

/// "3 ranks on host h see 2 cards"; empty when there are enough. Ranks that see different cards, each its
/// own, must have chosen theirs to be told apart.
std::string too_few_cards(const std::vector<RankDevice>& members) {
  struct Host {
    std::vector<int> ranks;
    int visible = 0;
  };
  std::map<std::pair<std::string, std::string>, Host> hosts;
  for (const RankDevice& member : members) {
    if (member.visible == 0 || !member.card.empty()) continue;
    Host& host = hosts[host_of(member)];
    host.ranks.push_back(member.rank);
    host.visible = std::max(host.visible, member.visible);
  }
  std::string all;
  for (const auto& [name, host] : hosts) {
    if (static_cast<int>(host.ranks.size()) <= host.visible) continue;
    all += (all.empty() ? "" : "; ") + name_ranks(host.ranks) + " on host " + name.second + " see " +
           counted(host.visible, "card") + ", and have not chosen one";
  }
  return all;
}

std::string nccl_problems(const std::vector<RankDevice>& members) {
  return who_says_what(members, [](const RankDevice& member) { return member.nccl_problem; });
}

constexpr const char* kLockstepInstead =
    "\"lockstep\" (or no backend at all), which stages the tensors of cards through shared memory";

BackendChoice refuse_or_nccl(const std::vector<RankDevice>& members) {
  const std::string& asked = members.front().backend;
  BackendChoice decision{.backend = asked, .warnings = {}};
  const std::string begin = "backend '" + asked + "' can't be used: ";
  if (const std::string problems = nccl_problems(members); !problems.empty()) {
    decision.refusal = begin + problems + ". With CPU tensors use \"lockstep\", or no backend at all";
  } else if (const std::string sharing = who_shares(members); !sharing.empty()) {
    decision.refusal =
        begin + sharing +
        ", and NCCL wants a card for each rank. Start no more ranks per host than it has "
        "cards and call lockstep::set_device(), which chooses by LOCAL_RANK, in each; or use " +
        kLockstepInstead;
  } else if (const std::string few = too_few_cards(members); !few.empty()) {
    decision.refusal =
        begin + few +
        ", so that some would share one, which NCCL refuses. Call lockstep::set_device() before "
        "init_process_group(), start fewer ranks, or use " +
        kLockstepInstead;
  }
  return decision;
}

BackendChoice choose(const std::vector<RankDevice>& members) {
  BackendChoice decision{.backend = backend_names::kLockstep, .warnings = {}};
  const auto on_cuda = [](const RankDevice& member) { return member.device.starts_with("cuda"); };
  const std::string sharing = who_shares(members);
  if (!sharing.empty()) {
    decision.warnings.push_back(
        sharing +
        ": they take turns on it, and their tensors go through shared memory, for NCCL "
        "wants a card for each rank; start one rank for each card to be faster");
  }
  if (std::none_of(members.begin(), members.end(), on_cuda)) return decision;
  if (!std::all_of(members.begin(), members.end(), on_cuda)) {
    decision.warnings.push_back(who_says_what(members,
                                              [&](const RankDevice& member) -> std::string {
                                                return on_cuda(member) ? "a card" : "no card of its own";
                                              }) +
                                "; so CUDA tensors go through shared memory instead of NCCL. Call "
                                "lockstep::set_device() in every rank before "
                                "init_process_group()");
    return decision;
  }
  if (!sharing.empty()) return decision;
  if (const std::string problems = nccl_problems(members); !problems.empty()) {
    decision.warnings.push_back("CUDA tensors go through shared memory, for NCCL can't be used: " + problems);
    return decision;
  }
  decision.backend = backend_names::kBoth;
  return decision;
}

}  // namespace

RankDevice describe_this_rank(int rank, const std::string& backend) {
  const HostIdentity host = this_host();
  RankDevice own{.rank = rank, .host = host.hostname, .backend = backend, .device = {}, .card = {}};
  own.host_identity = host.to_string();
  // The others wait for this rank's answer: whatever goes wrong is told, not thrown.
  try {
    const auto chosen = chosen_device();
    const bool on_cuda = chosen && chosen->is_cuda();
    std::string problem;
    // First, for the library knows the cards' identities, and page-locks staging memory.
    if (backend_names::uses_nccl(backend) || on_cuda) problem = why_no_cuda();
    if (chosen) {
      own.device = chosen->str();
      own.card = card_identity(*chosen);
    }
    if (backend_names::uses_nccl(backend) || (backend.empty() && on_cuda)) {
      own.nccl_problem = problem;
      if (problem.empty()) own.visible = cuda_library().device_count();
    }
  } catch (const c10::Error& error) {
    own.nccl_problem = error.what_without_backtrace();
  }
  return own;
}

std::string to_record(const RankDevice& device) {
  std::string record = nlohmann::json{{"rank", device.rank},
                                      {"host", cut(device.host, kLongestText)},
                                      {"backend", cut(device.backend, kLongestText)},
                                      {"device", cut(device.device, 64)},
                                      {"card", cut(device.card, 128)},
                                      {"visible", device.visible},
                                      {"nccl_problem", cut(device.nccl_problem, kLongestProblem)},
                                      {"identity", cut(device.host_identity, kLongestText)}}
                           .dump();
  TORCH_INTERNAL_ASSERT(record.size() <= kRecordBytes);
  record.resize(kRecordBytes, '\0');
  return record;
}

RankDevice from_record(const std::string& record) {
  try {
    const auto json = nlohmann::json::parse(record.c_str());
    return {.rank = json.at("rank").get<int>(),
            .host = json.at("host").get<std::string>(),
            .backend = json.at("backend").get<std::string>(),
            .device = json.at("device").get<std::string>(),
            .card = json.at("card").get<std::string>(),
            .visible = json.at("visible").get<int>(),
            .nccl_problem = json.at("nccl_problem").get<std::string>(),
            .host_identity = json.at("identity").get<std::string>()};
  } catch (const nlohmann::json::exception& error) {
    C10_THROW_ERROR(DistBackendError, std::string("a rank did not say which device it has (") + error.what() +
                                          "); all ranks must run the same version of Lockstep");
  }
}

BackendChoice decide(const std::vector<RankDevice>& members) {
  TORCH_INTERNAL_ASSERT(!members.empty());
  const std::string& first = members.front().backend;
  const bool same = std::all_of(members.begin(), members.end(),
                                [&](const RankDevice& member) { return member.backend == first; });
  if (!same) {
    BackendChoice decision;
    decision.mismatch = who_says_what(members, [](const RankDevice& member) {
      return member.backend.empty() ? std::string("none") : "'" + member.backend + "'";
    });
    return decision;
  }
  if (first.empty()) return choose(members);
  if (backend_names::uses_nccl(first)) return refuse_or_nccl(members);
  BackendChoice decision{.backend = first, .warnings = {}};
  if (const std::string sharing = who_shares(members); !sharing.empty()) {
    decision.warnings.push_back(sharing + " and take turns on it; start one rank for each card to be faster");
  }
  return decision;
}

}  // namespace lockstep::collectives::internal::device_agreement

#pragma once

#include <string>
#include <vector>

/// Which backend a group's device tensors get. The ranks tell each other what they have; then all of them
/// come to the same decision, by pure functions. Thread-safe.
namespace lockstep::collectives::internal::device_agreement {

/// What a rank says of itself.
struct RankDevice {
  int rank = 0;                    // global
  std::string host;                // for messages
  std::string backend;             // as it asked for, see backend_names::check(); empty: it leaves it to us
  std::string device;              // "cuda:1" that it has chosen; empty: none
  std::string card;                // which card that is; empty: unknown
  int visible = 0;                 // CUDA devices that it sees, if it asks for NCCL; 0 otherwise
  std::string nccl_problem = {};   // why NCCL does not work there; empty: it does, or it was not asked
  std::string host_identity = {};  // hosts may have one name, as containers do
};

/// This process's, for what it asks. Loads CUDA only where a CUDA device was chosen, or NCCL is asked for.
RankDevice describe_this_rank(int rank, const std::string& backend);

/// The record has a fixed length, so that ranks can exchange it; what is too long is cut.
std::string to_record(const RankDevice& device);
/// The reverse. Throws c10::DistBackendError when it is no such record.
RankDevice from_record(const std::string& record);

struct BackendChoice {
  std::string backend;                // in words of backend_names; never empty
  std::vector<std::string> warnings;  // for people
  std::string mismatch = {};          // the ranks asked for different backends: which
  std::string refusal = {};           // what was asked for can't be had, and what to do; empty: it can
};

/// For the members of a group, by rank. NCCL, when it was asked for, or refused; when nothing was asked for,
/// NCCL if every rank has chosen a card of its own and NCCL works there, else "lockstep", which stages device
/// tensors through shared memory.
BackendChoice decide(const std::vector<RankDevice>& members);

}  // namespace lockstep::collectives::internal::device_agreement

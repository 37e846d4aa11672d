#pragma once

#include <vector>

#include <lockstep/collectives/testing/random_cases.h>

/// For each operation: a rank's tensors in a case, with what they hold before and must hold afterwards.
namespace lockstep::testing {

using Slots = std::vector<Slot>;

Slots no_slots(const Case& c, int rank);

// In place; one tensor for each part.
Slots all_reduce_slots(const Case& c, int rank);
Slots sparse_slots(const Case& c, int rank);
Slots reduce_slots(const Case& c, int rank);
Slots broadcast_slots(const Case& c, int rank);

// The input; on the root then the outputs, by rank.
Slots gather_slots(const Case& c, int rank);
// The output; on the root then the inputs, by rank.
Slots scatter_slots(const Case& c, int rank);
// The inputs, one for each part; then for each part the outputs, by rank.
Slots all_gather_slots(const Case& c, int rank);
// The inputs, one for each part; then the outputs.
Slots all_gather_into_slots(const Case& c, int rank);
// The output; then the inputs, by rank.
Slots reduce_scatter_slots(const Case& c, int rank);
// The inputs, one for each part; then the outputs.
Slots reduce_scatter_tensor_slots(const Case& c, int rank);
// The inputs, by rank; then the outputs.
Slots all_to_all_slots(const Case& c, int rank);
// The input; then the output.
Slots all_to_all_single_slots(const Case& c, int rank);

/// On the root the message to send, on the peer where it goes, elsewhere nothing.
Slots send_slots(const Case& c, int rank);
/// What is sent to the rank ahead, and where the message from the rank behind goes.
Slots batch_slots(const Case& c, int rank);
/// Each rank sends to the rank that is as far ahead as the case's peer is from its root.
struct Neighbours {
  int ahead, behind;
};
Neighbours neighbours(const Case& c, int rank);

}  // namespace lockstep::testing

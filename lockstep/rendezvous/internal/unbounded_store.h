#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::rendezvous_internal {

/// A store that has no deadline of its own: a FileStore reads for ever where its file ends in the middle of a record, and a
/// TCPStore waits for ever for the answer of a process that is stopped or cut off.
struct UnboundedStore {
  c10::intrusive_ptr<c10d::Store> store = {};  ///< null for stores of other kinds
  std::string file = {};                       ///< of a FileStore
};

/// The store itself, owned, where it is one of these, or a PrefixStore around one.
UnboundedStore as_unbounded(c10d::Store& store);

}  // namespace lockstep::rendezvous_internal

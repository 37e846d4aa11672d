#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <lockstep/rendezvous/internal/unbounded_store.h>

namespace lockstep::rendezvous_internal {

UnboundedStore as_unbounded(c10d::Store& store) {
  c10::intrusive_ptr<c10d::Store> below;
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store)) below = prefix->getUnderlyingNonPrefixStore();
  c10d::Store* const innermost = below ? below.get() : &store;
  const auto* file = dynamic_cast<c10d::FileStore*>(innermost);
  if (file == nullptr && dynamic_cast<c10d::TCPStore*>(innermost) == nullptr) return {};
  return {.store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store),
          .file = file == nullptr ? "" : file->getPath()};
}

}  // namespace lockstep::rendezvous_internal

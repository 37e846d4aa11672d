#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep::data::internal {

/// A data set as others hold it: one given as an lvalue is referred to, and must outlive them; a temporary is
/// moved in; a shared one is shared.
template <class Dataset>
std::shared_ptr<const Dataset> hold(const Dataset& dataset) {
  return {std::shared_ptr<void>(), &dataset};
}
template <class Dataset>
requires(!std::is_reference_v<Dataset> &&
         !std::is_const_v<Dataset>) std::shared_ptr<const Dataset> hold(Dataset&& dataset) {
  return std::make_shared<const Dataset>(std::move(dataset));
}

}  // namespace lockstep::data::internal

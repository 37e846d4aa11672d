#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/parallel/fsdp/internal/gather/access_observer.h>

namespace lockstep::fsdp::internal {
namespace {

/// RecordFunction::inputs() without its assertion, which reads a member that only a torch built without NDEBUG sets: in a debug
/// build against a released torch it fails always.
template <auto kMember>
struct InputsOf {
  friend c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function) {
    return function.*kMember;
  }
};
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& function);
template struct InputsOf<&at::RecordFunction::inputs_>;

struct Watched {
  std::shared_ptr<const AccessListenerSlot> slot;
  size_t unit;
};

/// A function of its own, by which watched storages are told from others.
void release_watched(void* watched) {
  delete static_cast<Watched*>(watched);
}

/// Of one operator, until it ends.
struct UsesOfOperator final : at::ObserverContext {
  std::vector<std::pair<std::shared_ptr<AccessListener>, size_t>> uses;
};

void look_at(const at::Tensor& tensor, std::unique_ptr<UsesOfOperator>& uses) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const at::DataPtr& data =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_watched) return;
  const auto* const watched = static_cast<const Watched*>(data.get_context());
  auto listener = watched->slot->listener.lock();
  const size_t unit = watched->unit;  // the storage has other data after before_use()
  if (listener == nullptr || !listener->before_use(unit)) return;
  if (uses == nullptr) uses = std::make_unique<UsesOfOperator>();
  uses->uses.emplace_back(std::move(listener), unit);
}

void look_at(const c10::IValue& input, std::unique_ptr<UsesOfOperator>& uses) {
  if (input.isTensor()) {
    look_at(input.toTensor(), uses);
  } else if (input.isTensorList() || input.isOptionalTensorList()) {
    for (const c10::IValue& element : input.toListRef()) look_at(element, uses);
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  std::unique_ptr<UsesOfOperator> uses;
  for (const c10::IValue& input : inputs_of(function)) look_at(input, uses);
  return uses;
}

void after_operator(const at::RecordFunction& /*function*/, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const auto& [listener, unit] : static_cast<UsesOfOperator*>(context)->uses) listener->after_use(unit);
}

}  // namespace

at::DataPtr watched_data(void* data, c10::Device device, std::shared_ptr<const AccessListenerSlot> slot,
                         size_t unit) {
  return {data, new Watched{std::move(slot), unit}, &release_watched, device};
}

bool is_watched(const at::DataPtr& data) {
  return data.get_deleter() == &release_watched;
}

AccessObserver::AccessObserver()
    : handle_(at::addGlobalCallback(at::RecordFunctionCallback(before_operator, after_operator)
                                        .needsInputs(true)
                                        .scopes({at::RecordScope::FUNCTION}))) {}

AccessObserver::~AccessObserver() {
  at::removeCallback(handle_);
}

}  // namespace lockstep::fsdp::internal

#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <lockstep/collectives/backend/internal/work_record.h>

namespace lockstep::collectives::internal {

struct WorkRecord::Prepared {
  at::RecordFunction function;
  at::ThreadLocalState submitter;  // with the state of its thread's profiler
  const char* title;
  std::vector<c10::IValue> inputs;
};

WorkRecord::WorkRecord(const char* title, const std::vector<at::Tensor>& inputs) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  prepared_.reset(new Prepared{at::RecordFunction(std::move(*callbacks)), at::ThreadLocalState(), title,
                               std::vector<c10::IValue>(inputs.begin(), inputs.end())});
}

WorkRecord::~WorkRecord() = default;

WorkRecord::Bar::Bar(WorkRecord& record) {
  if (!record.prepared_ || record.taken_.exchange(true)) return;
  open_ = record.prepared_.get();
  const at::ThreadLocalStateGuard as_submitter(open_->submitter);
  open_->function._setAsync();
  open_->function.before(open_->title,
                         c10::ArrayRef<const c10::IValue>(open_->inputs.data(), open_->inputs.size()));
}

WorkRecord::Bar::~Bar() {
  if (open_ == nullptr) return;
  const at::ThreadLocalStateGuard as_submitter(open_->submitter);
  open_->function.end();
  open_->inputs.clear();
}

}  // namespace lockstep::collectives::internal

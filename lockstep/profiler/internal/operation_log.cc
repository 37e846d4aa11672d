#include <algorithm>
#include <utility>

#include <c10/core/ScalarType.h>
#include <c10/util/ApproximateClock.h>

#include <lockstep/profiler/internal/operation_log.h>

namespace lockstep::profiler::internal {
namespace {

struct Size {
  int64_t elements = 0;
  int64_t bytes = 0;
};

Size size_of(const std::vector<at::Tensor>* tensors) {
  Size size;
  if (tensors == nullptr) return size;
  for (const at::Tensor& tensor : *tensors) {
    if (!tensor.defined()) continue;
    size.elements += tensor.numel();
    size.bytes += tensor.numel() * static_cast<int64_t>(tensor.element_size());
  }
  return size;
}

std::string dtype_of(const flight::ObservedOperation& operation) {
  for (const auto* tensors : {operation.inputs, operation.outputs}) {
    if (tensors == nullptr) continue;
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.defined()) return c10::toString(tensor.scalar_type());
    }
  }
  return {};
}

std::string call_text(const flight::CodePlace& where) {
  const std::string file = where.file;
  if (file.empty()) return {};
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(where.line);
}

}  // namespace

size_t OperationLog::place_of(const flight::ObservedGroup& group) {
  for (size_t i = content_.groups.size(); i-- > 0;) {
    const flight::ObservedGroup& known = content_.groups[i];
    if (known.name == group.name && known.key == group.key && known.rank == group.rank &&
        known.ranks == group.ranks) {
      return i;
    }
  }
  content_.groups.push_back(group);
  return content_.groups.size() - 1;
}

void OperationLog::scheduled(uint64_t id, const flight::ObservedGroup& group,
                             const flight::ObservedOperation& operation) {
  LoggedOperation logged;
  logged.scheduled_ns = c10::getTime();
  logged.kind = operation.kind;
  logged.sequence = operation.sequence;
  logged.point_to_point = operation.point_to_point;
  logged.peer = operation.peer;
  logged.tag = operation.tag;
  logged.asynchronous = operation.asynchronous;
  logged.detail = operation.detail;
  logged.dtype = dtype_of(operation);
  const Size input = size_of(operation.inputs), output = size_of(operation.outputs);
  logged.input_elements = input.elements;
  logged.output_elements = output.elements;
  logged.bytes = std::max(input.bytes, output.bytes);
  logged.where = call_text(operation.where);
  logged.purpose = operation.purpose;
  const std::lock_guard lock(mutex_);
  logged.group = place_of(group);
  open_.emplace(id, content_.operations.size());
  content_.operations.push_back(std::move(logged));
}

void OperationLog::started(uint64_t id) {
  const int64_t now = c10::getTime();
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  if (found != open_.end()) content_.operations[found->second].started_ns = now;
}

void OperationLog::ended(uint64_t id, const std::string* error) {
  const int64_t now = c10::getTime();
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end()) return;
  LoggedOperation& logged = content_.operations[found->second];
  logged.ended_ns = now;
  if (error != nullptr) logged.error = *error;
  open_.erase(found);
}

OperationLog::Content OperationLog::take() {
  const std::lock_guard lock(mutex_);
  open_.clear();
  return std::exchange(content_, {});
}

}  // namespace lockstep::profiler::internal

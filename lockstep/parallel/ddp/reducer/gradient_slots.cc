#include <utility>

#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/parallel/ddp/reducer/gradient_slots.h>

namespace lockstep {

GradientSlots::GradientSlots(std::vector<size_t> bytes, Take take)
    : take_(std::move(take)), planned_(bytes.size()), mistakes_(bytes.size(), 0) {
  for (const size_t size : bytes) {
    if (size > 0) sizes_.try_emplace(size);
  }
}

void GradientSlots::begin(int graph_task) {
  graph_task_ = graph_task;
  for (auto& [bytes, size] : sizes_) size.occurrences = 0;
  elsewhere_.clear();
}

MemoryBlock GradientSlots::allocate(size_t bytes) {
  last_ = {};
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end() || !take_ || torch::autograd::get_current_graph_task_id() != graph_task_)
    return {};
  SizeClass& size = found->second;
  last_ = {&size, size.occurrences++};
  if (last_.index >= size.parameter.size()) return {};
  const int64_t parameter = size.parameter[last_.index];
  return parameter == kNoParameter ? MemoryBlock{} : take_(static_cast<size_t>(parameter));
}

void GradientSlots::allocated_elsewhere(const void* memory, size_t /*bytes*/) {
  if (last_.size != nullptr) elsewhere_[memory] = last_;
}

void GradientSlots::forget(size_t parameter) {
  Occurrence& planned = planned_[parameter];
  if (planned.size == nullptr) return;
  planned.size->parameter[planned.index] = kNoParameter;
  planned = {};
  ++mistakes_[parameter];
}

void GradientSlots::arrived(size_t parameter, const void* gradient, bool in_slot) {
  if (in_slot || mistakes_[parameter] >= kMostMistakes) return;
  const auto found = elsewhere_.find(gradient);
  if (found == elsewhere_.end()) return forget(parameter);
  const Occurrence here = found->second;
  if (planned_[parameter].size == here.size && planned_[parameter].index == here.index) return;
  forget(parameter);
  auto& parameters = here.size->parameter;
  if (parameters.size() <= here.index) parameters.resize(here.index + 1, kNoParameter);
  if (parameters[here.index] != kNoParameter) forget(static_cast<size_t>(parameters[here.index]));
  parameters[here.index] = static_cast<int64_t>(parameter);
  planned_[parameter] = here;
}

}  // namespace lockstep

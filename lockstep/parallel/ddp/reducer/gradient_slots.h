#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include <lockstep/collectives/backend/memory_source.h>

namespace lockstep {

/// Lets the kernels of backward() write gradients where they are to be reduced.
///
/// As a source of memory it is asked for every CPU tensor that backward makes in its thread. Which of them
/// will be a parameter's gradient it can't know; but training repeats itself: the k-th tensor of so many
/// bytes is the same parameter's gradient in the next iteration. So it notes where each tensor of a
/// gradient's size went, learns from the reducer which of them became gradients (autograd takes them over as
/// they are), and next time hands out that gradient's slot. A wrong guess costs a copy, never a number: the
/// reducer copies whatever is not in its slot.
///
/// Used by one thread at a time.
class GradientSlots final : public MemorySource {
 public:
  /// Lends a parameter's slot; nothing if it is taken.
  using Take = std::function<MemoryBlock(size_t parameter)>;

  /// `bytes` of each parameter's gradient.
  GradientSlots(std::vector<size_t> bytes, Take take);

  /// A pass of autograd begins; `graph_task` is its number. Tensors that other passes make in this thread
  /// (nested ones, or later ones if this one ends by an exception) get no slots.
  void begin(int graph_task);
  /// The pass that began last; -1: none has.
  int graph_task() const { return graph_task_; }
  /// The parameter's gradient has arrived at this address.
  void arrived(size_t parameter, const void* gradient, bool in_slot);

  /// There are no slots any more; a thread may still have this as its source.
  void disconnect() { take_ = {}; }

  MemoryBlock allocate(size_t bytes) override;
  void allocated_elsewhere(const void* memory, size_t bytes) override;

 private:
  static constexpr int64_t kNoParameter = -1;
  /// After so many wrong guesses a parameter is left in peace.
  static constexpr int kMostMistakes = 3;

  struct SizeClass {
    size_t occurrences = 0;          // in this pass
    std::vector<int64_t> parameter;  // by occurrence
  };
  struct Occurrence {
    SizeClass* size = nullptr;
    size_t index = 0;
  };

  void forget(size_t parameter);

  Take take_;
  std::unordered_map<size_t, SizeClass> sizes_;  // by bytes
  std::vector<Occurrence> planned_;              // by parameter
  std::vector<int> mistakes_;                    // by parameter
  std::unordered_map<const void*, Occurrence> elsewhere_;
  Occurrence last_;  // of the allocation in progress
  int graph_task_ = -1;
};

}  // namespace lockstep

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::collectives::internal {

/// The bar of an operation in a profile, on the thread that runs it or waits for it: there it lies within or beside all else
/// that the thread does. The record of torch's Work begins on the thread that submits, and ends whenever the operation does;
/// readers drop bars that overlap others of their thread. Nothing where nothing is profiled. Thread-safe.
class WorkRecord {
  struct Prepared;

 public:
  /// In the thread that submits, whose profile it goes to. `title`: a literal.
  WorkRecord(const char* title, const std::vector<at::Tensor>& inputs);
  WorkRecord(const WorkRecord&) = delete;
  WorkRecord& operator=(const WorkRecord&) = delete;
  ~WorkRecord();

  /// The bar, while it lives, where it is the first of its record.
  class Bar {
   public:
    explicit Bar(WorkRecord& record);
    Bar(const Bar&) = delete;
    Bar& operator=(const Bar&) = delete;
    ~Bar();

   private:
    Prepared* open_ = nullptr;
  };

 private:
  std::unique_ptr<Prepared> prepared_;  // null: nothing is profiled
  std::atomic<bool> taken_{false};
};

}  // namespace lockstep::collectives::internal

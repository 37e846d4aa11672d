#pragma once

#include <cstddef>
#include <memory>

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace lockstep::fsdp::internal {

/// Hears of the operators that are given watched memory (watched_data()), before their kernels run, in their threads.
class AccessListener {
 public:
  virtual ~AccessListener() = default;
  /// Is called for memory that was watched as `unit`. True: after_use() shall be called when the operator has ended.
  virtual bool before_use(size_t unit) noexcept = 0;
  virtual void after_use(size_t unit) noexcept = 0;
};

/// The listener of some memory; set once, before any operator is given the memory. When it has expired, accesses are not told.
struct AccessListenerSlot {
  std::weak_ptr<AccessListener> listener;
};

/// What a storage on `device` has whose accesses are told to the slot's listener: `data` may be null, and is not freed with it.
at::DataPtr watched_data(void* data, c10::Device device, std::shared_ptr<const AccessListenerSlot> slot,
                         size_t unit);
/// Whether a storage has such data.
bool is_watched(const at::DataPtr& data);

/// While it lives, operators are observed: all of the process, in all threads. Operators of views are heard of as well, those
/// within an observed operator's kernel too. What is read without an operator, by data_ptr(), is not.
class AccessObserver {
 public:
  AccessObserver();
  AccessObserver(const AccessObserver&) = delete;
  AccessObserver& operator=(const AccessObserver&) = delete;
  ~AccessObserver();

 private:
  at::CallbackHandle handle_;
};

}  // namespace lockstep::fsdp::internal

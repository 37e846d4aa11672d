#include <algorithm>
#include <iterator>
#include <new>
#include <string_view>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/train/internal/failure_agreement.h>

namespace lockstep::train::internal {
namespace {

/// What LibTorch's CPU allocator says (c10/core/impl/alloc_cpu.cpp), which has no type of its own; CUDA's;
/// and the driver and cuBLAS, which ask for memory of their own.
bool says_out_of_memory(std::string_view text) {
  static constexpr std::string_view kTexts[] = {
      "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
      "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"};
  return std::any_of(std::begin(kTexts), std::end(kTexts),
                     [&](auto known) { return text.find(known) != std::string_view::npos; });
}

/// What NCCL says when this rank's card has no memory left for it; c10d makes it a DistBackendError.
bool says_nccl_is_out_of_memory(std::string_view text) {
  return text.find("Cuda failure 2 'out of memory'") != std::string_view::npos;
}

/// A rank's report of having no memory is every rank's reason to keep none back: ranks may share a card.
void make_room(const FailureAgreement& agreement) {
  const bool needed = std::any_of(agreement.reports.begin(), agreement.reports.end(), [](const auto& report) {
    return report.kind == FailureCause::kOutOfMemory;
  });
  if (needed) empty_device_cache();
}

FailureCause kind_of_nested(const std::exception& error, FailureCause otherwise) {
  const auto* nested = dynamic_cast<const std::nested_exception*>(&error);
  if (nested == nullptr || !nested->nested_ptr()) return otherwise;
  return kind_of(nested->nested_ptr()) == FailureCause::kOutOfMemory ? FailureCause::kOutOfMemory : otherwise;
}

StateDict as_object(const FailureReport& report, int rank) {
  return {{"kind", static_cast<int64_t>(report.kind)},
          {"text", report.text},
          {"step", report.step},
          {"largest_micro_batch", report.largest_micro_batch},
          {"can_repeat", report.can_repeat},
          {"can_save", report.can_save},
          {"rank", static_cast<int64_t>(rank)}};
}

FailureReport report_of(const StateDict& object) {
  constexpr const char* kOwner = "FailureReport";
  return {.kind = static_cast<FailureCause>(state_value<int64_t>(object, "kind", kOwner)),
          .text = state_value<std::string>(object, "text", kOwner),
          .step = state_value<int64_t>(object, "step", kOwner),
          .largest_micro_batch = state_value<int64_t>(object, "largest_micro_batch", kOwner),
          .can_repeat = state_value<bool>(object, "can_repeat", kOwner),
          .can_save = state_value<bool>(object, "can_save", kOwner)};
}

}  // namespace

FailureCause kind_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::OutOfMemoryError&) {
    return FailureCause::kOutOfMemory;
  } catch (const std::bad_alloc&) {
    return FailureCause::kOutOfMemory;
  } catch (const c10::DistBackendError& error) {
    if (says_nccl_is_out_of_memory(error.what_without_backtrace())) return FailureCause::kOutOfMemory;
    return kind_of_nested(error, FailureCause::kPeer);
  } catch (const std::exception& error) {
    if (says_out_of_memory(text_of(error))) return FailureCause::kOutOfMemory;
    return kind_of_nested(error, FailureCause::kOther);
  } catch (...) {
    return FailureCause::kOther;
  }
}

FailureAgreement agree_on_failure(const FailureReport& mine, std::chrono::milliseconds timeout) {
  if (!is_initialized() || get_world_size() == 1) {
    FailureAgreement alone{.group = is_initialized() ? default_group() : ProcessGroup(),
                           .reports = {mine},
                           .former_ranks = {0},
                           .any_rank_died = false};
    make_room(alone);
    return alone;
  }
  const int former_rank = get_rank();
  const int former_size = get_world_size();
  const auto backend = lockstep_backend_of(*default_group());
  const auto usual_timeout = backend ? backend->timeout() : std::chrono::minutes(30);
  set_group_timeout(timeout);  // how long the others are waited for
  abort();                     // whatever they wait for: this rank does not come there
  // Another one may die meanwhile; then the survivors meet again.
  for (int left = former_size;; --left) {
    try {
      FailureAgreement agreement;
      if (get_world_size() > 1) {
        agreement.group = shrink_group({}, {}, SHRINK_ABORT);
      } else {
        agreement.group = default_group();
      }
      for (const auto& state : all_gather_values(as_object(mine, former_rank))) {
        agreement.reports.push_back(report_of(state));
        agreement.former_ranks.push_back(
            static_cast<int>(state_value<int64_t>(state, "rank", "FailureReport")));
      }
      agreement.any_rank_died = get_world_size() < former_size;
      make_room(agreement);
      set_group_timeout(usual_timeout);
      return agreement;
    } catch (const DistTimeoutError&) {
      throw;
    } catch (const c10::DistBackendError& error) {
      if (left <= 1) throw;
      LOCKSTEP_LOG(kInfo) << "RobustLoop: meeting again: " << error.what_without_backtrace();
    }
  }
}

}  // namespace lockstep::train::internal

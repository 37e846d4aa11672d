#pragma once

#include <c10/core/ScalarType.h>

#include <lockstep/collectives/kernels/reduce_kernels_table.h>

/// The arithmetic of reductions: element-wise folds over the ranks' buffers, vectorised for the machine they
/// run on. Thread-safe.
namespace lockstep {

/// The kernels of an element type and operation, for the instruction set that cpu_capability() chooses (and throws as).
/// The reference stays valid for ever. float32/64, bfloat16, float16, bool, and the integers of 8 to 64 bits take
/// every operation, except that bool has no average, and floating-point types no bit operations. Throws
/// c10::ValueError that names type, operation and remedy when the combination is not supported.
const ReduceKernels& reduce_kernels(at::ScalarType type, ReduceOperation operation);

/// The operation's name in torch.distributed.ReduceOp: "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR",
/// "BXOR".
const char* to_string(ReduceOperation operation);

/// For tests and benchmarks: the kernels of one capability. Throws c10::ValueError if this machine does not
/// have it.
const ReduceKernels& reduce_kernels_for(const char* capability, at::ScalarType type,
                                        ReduceOperation operation);

}  // namespace lockstep

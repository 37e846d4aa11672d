#pragma once

#include <c10/core/ScalarType.h>

#include <lockstep/collectives/kernels/reduce_kernels_table.h>

/// The arithmetic of reductions: element-wise folds over the ranks' buffers, vectorised for the machine they
/// run on. Thread-safe.
namespace lockstep {

/// The kernels of an element type and operation, for the best instruction set of this machine, or for the one
/// that the environment variable LOCKSTEP_CPU_CAPABILITY names (default, avx2, avx512; read once). The
/// reference stays valid for ever. float32/64, bfloat16, float16, bool, and the integers of 8 to 64 bits take
/// every operation, except that integers and bool have no average, and floating-point types no bit
/// operations. Throws c10::ValueError that names type, operation and remedy when the combination is not
/// supported, or that names the variable when its value is unknown or asks for more than the machine has.
const ReduceKernels& reduce_kernels(at::ScalarType type, ReduceOperation operation);

/// The operation's name in torch.distributed.ReduceOp: "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR",
/// "BXOR".
const char* to_string(ReduceOperation operation);

/// The instruction set in use: "avx512", "avx2" or "default" (whatever the compiler takes for granted).
/// Throws as reduce_kernels() does.
const char* reduce_kernels_capability();

/// For tests and benchmarks: the kernels of one capability. Throws c10::ValueError if this machine does not
/// have it.
const ReduceKernels& reduce_kernels_for(const char* capability, at::ScalarType type,
                                        ReduceOperation operation);

}  // namespace lockstep

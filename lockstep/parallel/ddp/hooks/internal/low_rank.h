#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/ddp/hooks/internal/numpy_random.h>

/// PowerSGD's arithmetic; functions of torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py.
namespace lockstep::hooks::internal {

/// Makes the columns of each matrix (batch×n×r, r ≤ n) orthonormal, in place: by Gram-Schmidt for r ≤ 2 and
/// for 16-bit numbers, else by QR. `epsilon` is added to the lengths of columns (Gram-Schmidt only).
void orthogonalize(const at::Tensor& matrices, double epsilon);

/// The generator for one iteration's random matrices: seeded by the next number of `random`, the same on all
/// ranks; torch's global generator is left alone.
at::Generator next_generator(NumpyRandomState& random);

/// Whether a matrix is worth compressing.
bool should_compress(int64_t rows, int64_t columns, int64_t rank, double min_compression_rate);

}  // namespace lockstep::hooks::internal

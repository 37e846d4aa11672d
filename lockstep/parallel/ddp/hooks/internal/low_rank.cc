#include <tuple>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <lockstep/parallel/ddp/hooks/internal/low_rank.h>

namespace lockstep::hooks::internal {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const int64_t columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    const at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor length = at::linalg_vector_norm(column, 2, {1}, /*keepdim=*/true);
    if (epsilon != 0) length.add_(epsilon);
    column.div_(length);
    if (i + 1 < columns) {
      const at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
      rest.sub_(column.mul(rest).sum(1, /*keepdim=*/true).mul(column));
    }
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon) {
  TORCH_INTERNAL_ASSERT(matrices.dim() == 3 && matrices.size(2) <= matrices.size(1));
  const bool short_numbers = matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  if (matrices.size(2) <= 2 || short_numbers) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

at::Generator next_generator(NumpyRandomState& random) {
  return at::make_generator<at::CPUGeneratorImpl>(random.randint(1'000'000'000));
}

bool should_compress(int64_t rows, int64_t columns, int64_t rank, double min_compression_rate) {
  return static_cast<double>((rows + columns) * rank) * min_compression_rate <
         static_cast<double>(rows * columns);
}

}  // namespace lockstep::hooks::internal

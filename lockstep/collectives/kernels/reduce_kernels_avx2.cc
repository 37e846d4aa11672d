// The reduce kernels for AVX2 with F16C; compiled with -mavx2 -mf16c, and called only where the machine has
// both.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif
#define LOCKSTEP_REDUCE_TABLE kReduceTableAvx2
#include <lockstep/collectives/kernels/reduce_kernels_impl.h>
#endif

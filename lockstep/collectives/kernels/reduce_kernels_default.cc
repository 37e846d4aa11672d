// The reduce kernels for whatever machine the compiler takes for granted: SSE2 on x86-64, and right
// everywhere.
#define LOCKSTEP_REDUCE_TABLE kReduceTableDefault
#include <lockstep/collectives/kernels/reduce_kernels_impl.h>

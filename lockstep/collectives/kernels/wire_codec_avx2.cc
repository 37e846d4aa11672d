// The wire codecs for AVX2 with F16C; compiled with -mavx2 -mf16c, and called only where the machine has
// both.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif
#define LOCKSTEP_WIRE_CODECS kWireCodecsAvx2
#include <lockstep/collectives/kernels/wire_codec_impl.h>
#endif

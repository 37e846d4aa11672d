// The wire codecs for AVX-512; compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c, and called
// only where the machine has all of them.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c"
#endif
#define LOCKSTEP_WIRE_CODECS kWireCodecsAvx512
#include <lockstep/collectives/kernels/wire_codec_impl.h>
#endif

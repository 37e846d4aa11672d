// The wire codecs for whatever machine the compiler takes for granted: SSE2 on x86-64, and right
// everywhere.
#define LOCKSTEP_WIRE_CODECS kWireCodecsDefault
#include <lockstep/collectives/kernels/wire_codec_impl.h>

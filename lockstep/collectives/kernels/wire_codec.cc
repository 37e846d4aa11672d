#include <lockstep/collectives/kernels/wire_codec.h>

namespace lockstep {
namespace {

using collectives::internal::WireCodecTable;

constexpr size_t kLeastEncodedBytes = size_t{16} << 10;

const WireCodecTable& codecs_of(CpuCapability capability) {
#if defined(__x86_64__)
  if (capability == CpuCapability::kAvx512) return collectives::internal::kWireCodecsAvx512;
  if (capability == CpuCapability::kAvx2) return collectives::internal::kWireCodecsAvx2;
#endif
  return collectives::internal::kWireCodecsDefault;
}

}  // namespace

const WireCodec& wire_codec_for(CpuCapability capability, HostCompression compression) {
  return codecs_of(capability).entries[static_cast<size_t>(compression)];
}

const WireCodec& wire_codec(HostCompression compression) {
  return wire_codec_for(cpu_capability(), compression);
}

size_t encoded_bytes(HostCompression compression, size_t count) {
  switch (compression) {
    case HostCompression::kNone:
      break;
    case HostCompression::kBf16:
      return count * 2;
    case HostCompression::kInt8:
      return count + (count + kCodecBlock - 1) / kCodecBlock * sizeof(float);
  }
  return count * sizeof(float);
}

bool is_encoded(HostCompression compression, at::ScalarType type, ReduceOperation operation, size_t count) {
  return compression != HostCompression::kNone && type == at::ScalarType::Float &&
         (operation == ReduceOperation::kSum || operation == ReduceOperation::kAverage) &&
         count * sizeof(float) >= kLeastEncodedBytes;
}

}  // namespace lockstep

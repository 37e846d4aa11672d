#include <new>

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>  // takes the widest vectors that this processor has
#else
#include <xxhash.h>
#endif

#include <lockstep/base/text/hex.h>
#include <lockstep/checkpoint/internal/checksum.h>

namespace lockstep::checkpoint::internal {
namespace {

std::string hex_of(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return to_hex(canonical.digest);
}

}  // namespace

struct Checksum::State {
  State() : state(XXH3_createState()) {
    if (state == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(state);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { XXH3_freeState(state); }
  XXH3_state_t* state;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;

void Checksum::update(const void* data, size_t bytes) {
  XXH3_128bits_update(state_->state, data, bytes);
}

std::string Checksum::hex() const {
  return hex_of(XXH3_128bits_digest(state_->state));
}

std::string checksum_of(std::string_view bytes) {
  return hex_of(XXH3_128bits(bytes.data(), bytes.size()));
}

}  // namespace lockstep::checkpoint::internal

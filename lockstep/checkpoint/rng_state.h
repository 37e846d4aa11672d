#pragma once

#include <cstdint>

#include <lockstep/serialization/state_dict.h>

namespace lockstep {

/// The states of torch's default random number generators: "cpu", the bytes of Python's
/// torch.get_rng_state(), and, where this process uses CUDA devices, "cuda", a list like
/// torch.cuda.get_rng_state_all() (of another accelerator, the list under its name). Generators that a
/// program has made itself are its own to save. Thread-safe.
StateDict get_rng_state();

/// Takes what get_rng_state() returned, here or (as {"cpu": torch.get_rng_state()}) in Python. A state of
/// other devices than there are is taken as far as it goes; without "cuda" those stay. Throws c10::ValueError
/// for what is no such state; nothing has changed then. Thread-safe.
void set_rng_state(const StateDict& state);

/// A number that stands for the CPU generator's state; drawing changes it, asking doesn't.
int64_t rng_fingerprint();

/// Seeds the generators for a rank of a run that goes on with another number of ranks, where no rank's state
/// fits: with a hash of `fingerprint`, the old rank 0's, and the new place. So ranks draw other numbers from
/// each other, and other ones than at the run's begin; the same call seeds the same. Thread-safe.
void derive_rng_state(int64_t fingerprint, int64_t rank, int64_t world_size);

}  // namespace lockstep

#pragma once

#include <cstddef>

namespace lockstep::transport {

/// Shared memory is not inherited: a forked child that wrote to it would write into live collectives. In its
/// place a child finds pages that no thread may touch, and a handler of SIGSEGV that says so and ends the
/// child with status 1; without them it would read whatever the child maps there next, or crash without a
/// word.
///
/// All functions are thread-safe.

/// From now on children see such pages at [address, address + bytes), which must be a mapping of its own.
void keep_from_forked_children(void* address, size_t bytes);
/// Before the mapping ends.
void forget_forked_memory(void* address);

/// Whether the address lies in shared memory of this forked process's parent.
bool is_forked_memory(const void* address);

/// In a forked child: puts the handler in front again, where the program has installed one of its own
/// meanwhile, as torch's DataLoader workers do; faults elsewhere go on to that. Does nothing in other
/// processes.
void install_forked_memory_handler();

}  // namespace lockstep::transport

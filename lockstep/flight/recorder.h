#pragma once

#include <string>

#include <lockstep/flight/operation_observer.h>

/// The flight recorder: the last operations of this process, for the question "which rank waits for which?"
/// after a hang. The fields are those of PyTorch's recorder (c10d/FlightRecorder.hpp). Backends tell it of their
/// operations by the functions in operation_observer.h.
///
/// Always on; an operation costs well under a microsecond. Written as JSON to one file for each rank when an
/// operation times out or a group is aborted or fails, and on SIGUSR1; `lockstep inspect flight DIR` reads
/// them. LOCKSTEP_FLIGHT_RECORDS (or TORCH_FR_BUFFER_SIZE; 2000 unless told, at most 50000) says how many
/// operations are kept, 0 switches the recorder off. LOCKSTEP_FLIGHT_DIR says where the files go; see
/// docs/debugging_a_hang.md. A forked child starts with a recorder of its own, which is empty and watches no signal.
/// All functions are thread-safe.
namespace lockstep::flight {

/// Whether this process has submitted an operation since it joined its world.
bool has_records();

/// Writes all records to this rank's file (a temporary one, then renamed) and says in the log where, unless
/// `lockstep run` started this process and will say it (SIGUSR1's line comes always); returns its path, or an
/// empty string if that was not possible (logged, never thrown: it is called on the way out of failures) or
/// the recorder is off. `reason`: "timeout", "abort", "SIGUSR1", …
///
/// Many groups of a process may fail at once, so nothing is written when nothing changed since the last
/// time, nor more often than a few times a second: what such a call leaves out, the signal's thread writes
/// afterwards, where there is one.
std::string dump(const std::string& reason);

/// Writes what another recorder knows (NCCL's, say) to a file of this name beside this process's own records.
/// Returns its path, or an empty string if that was not possible (logged, never thrown).
std::string write_beside(const std::string& name, const std::string& content);

/// From now on SIGUSR1 makes this process write its records, from a thread of its own, and go on. Does
/// nothing when the recorder is off, LOCKSTEP_FLIGHT_SIGNAL is 0, or the program handles or ignores SIGUSR1
/// itself. Called when the process has joined its world; again makes no difference. Throws c10::ValueError
/// when one of the variables is malformed.
void watch_signal();

/// Ends the thread. SIGUSR1 is caught and does nothing afterwards: one that comes late must not end the
/// process.
void unwatch_signal();

}  // namespace lockstep::flight

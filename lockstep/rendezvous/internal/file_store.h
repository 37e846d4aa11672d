#pragma once

#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/deadline.h>

/// torch's FileStore, with a deadline where it has none: when the file ends in the middle of a record,
/// because a process was killed while it wrote or the disk is full, FileStore reads for ever, and it waits
/// for ever for the file's lock.
namespace lockstep::rendezvous_internal {

/// FileStore waits for a file that it can't open. Throws c10::ValueError that says why it can't.
void check_store_file(const std::string& path);

/// Opens the file, or makes it. `timeout` becomes the store's own. Throws c10::DistStoreError when the file
/// can't be read by the deadline.
c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int world_size,
                                                std::chrono::milliseconds timeout, Deadline deadline);

/// "the file PATH of the store can't be read: …", with the remedy.
std::string describe_unreadable(const std::string& path);

}  // namespace lockstep::rendezvous_internal

#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

/// The stores at which torch.distributed's env://, tcp:// and file:// meet, for programs in Python. They are torch's own
/// TCPStore and FileStore, opened as those of C++ programs are: with a deadline, errors that name place and remedy, and no
/// socket that listens on all interfaces. `timeout` is for the call, and becomes the store's own. All may be called by
/// several threads at a time, and are ended by an Interruption. torch/distributed/rendezvous.py.
namespace lockstep::torch_store {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Rank 0's: listens at host:port as init_process_group() does by tcp:// (rendezvous/internal/sockets.h), and does not wait
/// for the others. Where this process serves a store at that port already, the two are one, as with torch's multi_tenant.
/// `use_libuv`: which of torch's servers. Throws c10::DistNetworkError.
StorePtr serve_tcp(const std::string& host, uint16_t port, int world_size, bool use_libuv,
                   std::chrono::milliseconds timeout);

/// The other ranks', and all ranks' where a launcher serves it. `who`, "rank 0" say, is for messages: warnings while it does
/// not answer, and c10::DistNetworkError at the end of the timeout.
StorePtr join_tcp(const std::string& host, uint16_t port, const std::string& who, int rank,
                  std::chrono::milliseconds timeout);

/// Throws c10::ValueError for a path where no file can be, and c10::DistStoreError when the file can't be read in time:
/// FileStore alone would read for ever where it ends in the middle of a record.
StorePtr open_file(const std::string& path, int world_size, std::chrono::milliseconds timeout);

}  // namespace lockstep::torch_store

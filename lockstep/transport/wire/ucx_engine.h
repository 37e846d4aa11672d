#pragma once

#include <memory>
#include <string>

#include <lockstep/transport/wire/engine.h>

namespace lockstep::transport::wire {

struct UcxOptions {
  std::string interface = {};   // the socket interface to use, "eth0"; empty: those that UCX chooses
  std::string port_range = {};  // "20000-20100": where to listen; unless an earlier engine had one
};

/// An engine between processes, by UCX: over TCP, and over InfiniBand or RoCE where UCX finds them. Never by
/// shared memory. Environment variables UCX_… that the user has set go before all that is chosen here.
///
/// The library is loaded at the first call, which sets environment variables (see UcxLibrary::load()), so it
/// comes before the process's threads where that can be had. Throws c10::DistBackendError: there is no UCX
/// (the message says which package to install), this build is without, or UCX can't use the interface.
std::unique_ptr<Engine> make_ucx_engine(int rank, const UcxOptions& options);

/// Why make_ucx_engine() throws for want of UCX, without throwing; empty when it is there. Loads it.
std::string why_no_ucx();

}  // namespace lockstep::transport::wire

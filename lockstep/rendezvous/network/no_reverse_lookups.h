#pragma once

#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// For the thread that makes it, until that ends: the name service knows no names of addresses, and is asked
/// for none over the network. c10d's TCPStore asks for its server's name when it connects, just for messages
/// (torch/csrc/distributed/c10d/socket.cpp, formatSockAddr), and a name server that does not answer, or drops
/// some of many ranks' questions, costs 5 to 10 s. Make it on a thread of its own that resolves no names:
/// glibc's resolver is set for each thread, and this one does not set it back. The store's own server asks on
/// a thread of libtorch's, out of reach; not for ranks of its host, whose addresses are in /etc/hosts.
class NoReverseLookups {
 public:
  NoReverseLookups();
  NoReverseLookups(const NoReverseLookups&) = delete;
  NoReverseLookups& operator=(const NoReverseLookups&) = delete;
  ~NoReverseLookups();

 private:
  UniqueFd socket_;  // of the thread below
  BackgroundThread server_;
};

}  // namespace lockstep

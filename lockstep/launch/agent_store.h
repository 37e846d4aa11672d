#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}

namespace lockstep::launch {

/// The store that workers meet at, hosted by their launcher (as torchrun's agent does, so that it outlives any
/// rank). It listens at one address, 127.0.0.1 unless told, on a port that was bound before any worker was
/// told of it: no other program can take it in between. Lives as long as the object; serves on threads of its
/// own.
class AgentStore {
 public:
  /// Port 0 takes a free one; `host` is numeric. Throws c10::DistNetworkError when the port is in use, when the loopback
  /// interface is down, and when the store does not start within half a minute. While it starts, `cancelled`
  /// is asked again and again; when it says so, there is no store.
  explicit AgentStore(uint16_t port = 0, const std::function<bool()>& cancelled = {},
                      const std::string& host = "127.0.0.1");
  AgentStore(const AgentStore&) = delete;
  AgentStore& operator=(const AgentStore&) = delete;
  ~AgentStore();

  /// 0 where there is none.
  uint16_t port() const { return port_; }

 private:
  uint16_t port_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace lockstep::launch

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/connection.h>

struct ssl_ctx_st;
struct ssl_st;

namespace lockstep::launch {

/// TLS 1.3 with a pre-shared key and a fresh Diffie-Hellman exchange for each connection (psk_dhe_ke, RFC 8446): both
/// ends prove that they know the key, and what was recorded can't be read by one who learns the key later. No
/// certificates, no tickets, no early data, so that nothing can be replayed. By OpenSSL. Immutable; thread-safe.
class TlsKey {
 public:
  /// The key is made of a job's secret and its id, so that two jobs with one secret do not speak to each other, and of the
  /// version, own_version() unless given, so that agents of two versions do not misread each other.
  TlsKey(std::string_view secret, std::string_view job_id);
  TlsKey(std::string_view secret, std::string_view job_id, std::string_view version);

 private:
  friend class TlsConnection;
  struct Contexts;
  std::shared_ptr<const Contexts> contexts_;
};

/// One connection over a socket that does not block. The thread blocks or ignores SIGPIPE, for OpenSSL writes as to any
/// file. Not thread-safe.
class TlsConnection : public Connection {
 public:
  enum class Side { kClient, kServer };

  TlsConnection(const TlsKey& key, UniqueFd socket, Side side);
  ~TlsConnection() override;

  int fd() const override { return socket_.get(); }
  Phase phase() const override { return phase_; }
  /// It was closed for what the other end sent, an alert say; otherwise the connection itself ended.
  bool disagreed() const { return disagreed_; }
  /// Of a server: the version that the other end says it has, where it is not that of the key. Nothing proves it.
  const std::string& other_version() const { return other_version_; }
  /// The connection is open once both ends have shown that they know the key; it is closed when the other end does not.
  void advance_handshake() override;
  size_t read(std::span<char> buffer) override;
  size_t write(std::string_view bytes) override;
  void close() override;
  short events(bool wants_to_write) const override;

 private:
  /// The one place where the phase changes to kClosed: after SSL_read, SSL_write, SSL_do_handshake failed.
  void take_error(int result, short& wants);

  UniqueFd socket_;
  std::shared_ptr<const void> key_;  // what the SSL object refers to
  ssl_st* ssl_ = nullptr;
  Phase phase_ = Phase::kHandshake;
  bool disagreed_ = false;
  std::string other_version_;  // of find_key()
  short read_wants_;
  short write_wants_;
};

}  // namespace lockstep::launch

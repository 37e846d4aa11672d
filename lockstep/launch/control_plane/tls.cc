#include <array>
#include <cstdint>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <poll.h>

#include <c10/util/Exception.h>

#include <lockstep/launch/control_plane/tls.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::launch {

/// What OpenSSL's callbacks get.
struct PreSharedKey {
  std::array<uint8_t, 32> bytes = {};
  std::string identity;  // the version, for an error: the key alone decides
};

namespace {

constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kCipherId = {0x13, 0x01};

const PreSharedKey& key_of(SSL* ssl) {
  return *static_cast<const PreSharedKey*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
}

/// What a TLS 1.3 session of this key would be; the caller owns it. Null without memory.
SSL_SESSION* make_session(SSL* ssl) {
  const auto& key = key_of(ssl).bytes;
  SSL_SESSION* session = SSL_SESSION_new();
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherId.data());
  if (session != nullptr && cipher != nullptr &&
      SSL_SESSION_set1_master_key(session, key.data(), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, cipher) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

int use_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* size, SSL_SESSION** session) {
  *session = make_session(ssl);
  *identity = reinterpret_cast<const unsigned char*>(key_of(ssl).identity.data());
  *size = key_of(ssl).identity.size();
  return *session != nullptr ? 1 : 0;
}

int find_key(SSL* ssl, const unsigned char* identity, size_t size, SSL_SESSION** session) {
  const std::string_view theirs(reinterpret_cast<const char*>(identity), size);
  const bool ours = theirs == key_of(ssl).identity;
  *session = ours ? make_session(ssl) : nullptr;
  auto& other_version = *static_cast<std::string*>(SSL_get_app_data(ssl));
  if (!ours) other_version = theirs;
  return 1;
}

SSL_CTX* make_context(const SSL_METHOD* method, PreSharedKey& key) {
  SSL_CTX* context = SSL_CTX_new(method);
  TORCH_CHECK(context != nullptr, "OpenSSL makes no context");
  SSL_CTX_set_app_data(context, &key);
  SSL_CTX_set_psk_use_session_callback(context, use_key);
  SSL_CTX_set_psk_find_session_callback(context, find_key);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                SSL_MODE_RELEASE_BUFFERS);
  const bool good = SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                    SSL_CTX_set_ciphersuites(context, kCipher) == 1 &&
                    SSL_CTX_set_num_tickets(context, 0) == 1;
  TORCH_CHECK(good, "OpenSSL can't do TLS 1.3 with ", kCipher);
  return context;
}

/// How OpenSSL 3 tells that the other end has closed the connection without a word; 1.1.1 has a result of its own.
bool is_end_of_file([[maybe_unused]] unsigned long error) {
#ifdef SSL_R_UNEXPECTED_EOF_WHILE_READING
  return ERR_GET_REASON(error) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
#else
  return false;
#endif
}

}  // namespace

struct TlsKey::Contexts {
  Contexts(std::string_view secret, std::string_view job_id, std::string_view version) {
    key.identity = version;
    const std::string text = "lockstep agents " + key.identity + "\n" + std::string(job_id);
    unsigned size = 0;
    const bool made = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                           reinterpret_cast<const unsigned char*>(text.data()), text.size(), key.bytes.data(),
                           &size) != nullptr;
    TORCH_CHECK(made && size == key.bytes.size(), "OpenSSL makes no key");
    client = make_context(TLS_client_method(), key);
    // A server without the key would have to show a certificate, and none is trusted.
    SSL_CTX_set_verify(client, SSL_VERIFY_PEER, nullptr);
    server = make_context(TLS_server_method(), key);
  }
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;
  ~Contexts() {
    SSL_CTX_free(client);
    SSL_CTX_free(server);
    OPENSSL_cleanse(key.bytes.data(), key.bytes.size());
  }

  PreSharedKey key = {};
  SSL_CTX* client = nullptr;
  SSL_CTX* server = nullptr;
};

TlsKey::TlsKey(std::string_view secret, std::string_view job_id) : TlsKey(secret, job_id, own_version()) {}

TlsKey::TlsKey(std::string_view secret, std::string_view job_id, std::string_view version)
    : contexts_(std::make_shared<const Contexts>(secret, job_id, version)) {}

TlsConnection::TlsConnection(const TlsKey& key, UniqueFd socket, Side side)
    : socket_(std::move(socket)), key_(key.contexts_), read_wants_(POLLIN), write_wants_(POLLOUT) {
  ssl_ = SSL_new(side == Side::kServer ? key.contexts_->server : key.contexts_->client);
  TORCH_CHECK(ssl_ != nullptr && SSL_set_fd(ssl_, socket_.get()) == 1, "OpenSSL makes no connection");
  SSL_set_app_data(ssl_, &other_version_);
  if (side == Side::kServer) {
    SSL_set_accept_state(ssl_);
  } else {
    SSL_set_connect_state(ssl_);
    read_wants_ = POLLOUT;
  }
}

TlsConnection::~TlsConnection() {
  close();
}

void TlsConnection::close() {
  if (ssl_ != nullptr) {
    ERR_clear_error();
    if (phase_ == Phase::kOpen) SSL_shutdown(ssl_);  // says that this is the end, if there is room to say it
    SSL_free(ssl_);
    ssl_ = nullptr;
  }
  phase_ = Phase::kClosed;
  socket_.reset();
}

void TlsConnection::take_error(int result, short& wants) {
  switch (SSL_get_error(ssl_, result)) {
    case SSL_ERROR_WANT_READ:
      wants = POLLIN;
      return;
    case SSL_ERROR_WANT_WRITE:
      wants = POLLOUT;
      return;
    case SSL_ERROR_SSL:
      disagreed_ = !is_end_of_file(ERR_peek_error());
      break;
    default:
      break;
  }
  phase_ = Phase::kClosed;  // without a word of ours: OpenSSL has sent an alert where one is due
  close();
}

void TlsConnection::advance_handshake() {
  if (phase_ != Phase::kHandshake) return;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_);
  if (result != 1) return take_error(result, read_wants_);
  // A handshake that succeeded without the key there is none; this is the second lock.
  if (SSL_session_reused(ssl_) != 1 || SSL_version(ssl_) != TLS1_3_VERSION) return close();
  phase_ = Phase::kOpen;
  read_wants_ = POLLIN;
  write_wants_ = POLLOUT;
}

size_t TlsConnection::read(std::span<char> buffer) {
  if (phase_ != Phase::kOpen || buffer.empty()) return 0;
  ERR_clear_error();
  size_t got = 0;
  const int result = SSL_read_ex(ssl_, buffer.data(), buffer.size(), &got);
  read_wants_ = POLLIN;
  if (result == 1) return got;
  take_error(result, read_wants_);
  return 0;
}

size_t TlsConnection::write(std::string_view bytes) {
  if (phase_ != Phase::kOpen || bytes.empty()) return 0;
  ERR_clear_error();
  size_t written = 0;
  const int result = SSL_write_ex(ssl_, bytes.data(), bytes.size(), &written);
  write_wants_ = POLLOUT;
  if (result == 1) return written;
  take_error(result, write_wants_);
  return 0;
}

short TlsConnection::events(bool wants_to_write) const {
  if (phase_ == Phase::kClosed) return 0;
  return static_cast<short>(read_wants_ | (phase_ == Phase::kOpen && wants_to_write ? write_wants_ : 0));
}

}  // namespace lockstep::launch

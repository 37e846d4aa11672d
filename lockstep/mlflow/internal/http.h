#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

namespace lockstep::mlflow::internal {

/// How a server is reached.
struct HttpOptions {
  std::string base_url = {};  ///< without a slash at its end
  std::string token = {};     ///< sent as a bearer; goes before user name and password
  std::string username = {};
  std::string password = {};
  bool verify_tls = true;
  std::string ca_file = {};  ///< PEM; the system's unless told
  std::chrono::milliseconds timeout{10'000};
};

/// What came back. `status` 0: no whole answer came, and `error` says why.
struct HttpAnswer {
  long status = 0;
  std::string body = {};
  std::string error = {};
  std::chrono::seconds retry_after{0};  ///< as the server asks; 0: it does not

  bool ok() const { return status >= 200 && status < 300; }
};

/// One connection to one server, by libcurl; kept open between requests. It follows no redirects, since a
/// credential must not go elsewhere. One thread at a time, but for cancel_at().
class HttpConnection {
 public:
  explicit HttpConnection(HttpOptions options);
  ~HttpConnection();

  HttpAnswer get(const std::string& path_and_query);
  /// `once`: for what must not happen twice. libcurl itself repeats a request on a connection that was kept
  /// open and has died, though the server may have acted on it; a new connection it does not.
  HttpAnswer post_json(const std::string& path, const std::string& json, bool once = false);
  /// The file as the body; it may take as long as bytes move, and the server may store it for a second per
  /// MiB more than `timeout`.
  HttpAnswer put_file(const std::string& path, const std::filesystem::path& file);

  /// Ends the request under way, and all later ones, at that time. From any thread.
  void cancel_at(std::chrono::steady_clock::time_point time);

  /// `text` as a part of a path or query.
  static std::string escape(const std::string& text);

 private:
  struct Curl;
  /// `patience`: how long no byte need move.
  HttpAnswer perform(const std::string& path, std::chrono::milliseconds patience);

  HttpOptions options_;
  std::atomic<std::chrono::steady_clock::time_point> cancel_at_{std::chrono::steady_clock::time_point::max()};
  std::unique_ptr<Curl> curl_;
};

}  // namespace lockstep::mlflow::internal

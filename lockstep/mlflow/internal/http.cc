#include <cerrno>
#include <cstdio>
#include <cstring>
#include <curl/curl.h>
#include <mutex>

#include <c10/util/Exception.h>

#include <lockstep/mlflow/internal/http.h>

namespace lockstep::mlflow::internal {
namespace {

constexpr size_t kLargestAnswer = size_t{4} << 20;  // more is no tracking server's

struct ListDeleter {
  void operator()(curl_slist* list) const { ::curl_slist_free_all(list); }
};
using List = std::unique_ptr<curl_slist, ListDeleter>;

List append(List list, const char* line) {
  curl_slist* longer = ::curl_slist_append(list.get(), line);
  TORCH_CHECK(longer != nullptr, "libcurl is out of memory");
  (void)list.release();  // `longer` begins with it
  return List(longer);
}

size_t on_body(char* data, size_t size, size_t count, void* answer) {
  auto& body = static_cast<HttpAnswer*>(answer)->body;
  if (body.size() + size * count > kLargestAnswer) return 0;
  body.append(data, size * count);
  return size * count;
}

}  // namespace

struct HttpConnection::Curl {
  Curl() {
    static std::once_flag once;
    std::call_once(once, [] { ::curl_global_init(CURL_GLOBAL_DEFAULT); });
    handle = ::curl_easy_init();
    TORCH_CHECK(handle != nullptr, "libcurl could not be initialised");
  }
  ~Curl() { ::curl_easy_cleanup(handle); }

  CURL* handle;
};

HttpConnection::HttpConnection(HttpOptions options)
    : options_(std::move(options)), curl_(std::make_unique<Curl>()) {}
HttpConnection::~HttpConnection() = default;

void HttpConnection::cancel_at(std::chrono::steady_clock::time_point time) {
  cancel_at_.store(time);
}

std::string HttpConnection::escape(const std::string& text) {
  char* escaped = ::curl_easy_escape(nullptr, text.data(), static_cast<int>(text.size()));
  TORCH_CHECK(escaped != nullptr, "libcurl is out of memory");
  std::string result = escaped;
  ::curl_free(escaped);
  return result;
}

HttpAnswer HttpConnection::get(const std::string& path_and_query) {
  CURL* curl = curl_->handle;
  ::curl_easy_reset(curl);
  ::curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, static_cast<long>(options_.timeout.count()));
  return perform(path_and_query, options_.timeout);
}

HttpAnswer HttpConnection::post_json(const std::string& path, const std::string& json, bool once) {
  CURL* curl = curl_->handle;
  ::curl_easy_reset(curl);
  // "Expect: 100-continue" would cost a round trip, or a second with servers that don't know it.
  const List headers = append(append(nullptr, "Content-Type: application/json"), "Expect:");
  ::curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.get());
  ::curl_easy_setopt(curl, CURLOPT_POSTFIELDS, json.data());
  ::curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(json.size()));
  ::curl_easy_setopt(curl, CURLOPT_FRESH_CONNECT, once ? 1L : 0L);
  ::curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, static_cast<long>(options_.timeout.count()));
  return perform(path, options_.timeout);
}

HttpAnswer HttpConnection::put_file(const std::string& path, const std::filesystem::path& file) {
  CURL* curl = curl_->handle;
  ::curl_easy_reset(curl);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(std::fopen(file.c_str(), "rb"), &std::fclose);
  TORCH_CHECK(opened, "cannot read ", file.string(), ": ", std::strerror(errno));
  const List headers = append(append(nullptr, "Content-Type: application/octet-stream"), "Expect:");
  ::curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.get());
  ::curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
  ::curl_easy_setopt(curl, CURLOPT_READDATA, opened.get());
  const auto size = static_cast<curl_off_t>(std::filesystem::file_size(file));
  ::curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, size);
  // No byte moves while the server stores what it has got, in an object store perhaps.
  return perform(path, options_.timeout + std::chrono::seconds(size >> 20));
}

HttpAnswer HttpConnection::perform(const std::string& path, std::chrono::milliseconds patience) {
  CURL* curl = curl_->handle;
  const std::string url = options_.base_url + path;
  const long seconds = std::max<long>(1, static_cast<long>(patience.count() / 1000));
  ::curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  ::curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  ::curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  ::curl_easy_setopt(curl, CURLOPT_USERAGENT, "lockstep");
  ::curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.timeout.count()));
  // Less than a byte a second for so long: the server is gone.
  ::curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
  ::curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, seconds);
  ::curl_easy_setopt(curl, CURLOPT_SSL_VERIFYPEER, options_.verify_tls ? 1L : 0L);
  ::curl_easy_setopt(curl, CURLOPT_SSL_VERIFYHOST, options_.verify_tls ? 2L : 0L);
  if (!options_.ca_file.empty()) ::curl_easy_setopt(curl, CURLOPT_CAINFO, options_.ca_file.c_str());
  if (!options_.token.empty()) {
    ::curl_easy_setopt(curl, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
    ::curl_easy_setopt(curl, CURLOPT_XOAUTH2_BEARER, options_.token.c_str());
  } else if (!options_.username.empty()) {
    ::curl_easy_setopt(curl, CURLOPT_HTTPAUTH, CURLAUTH_BASIC);
    ::curl_easy_setopt(curl, CURLOPT_USERNAME, options_.username.c_str());
    ::curl_easy_setopt(curl, CURLOPT_PASSWORD, options_.password.c_str());
  }
  HttpAnswer answer;
  ::curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_body);
  ::curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
  const curl_xferinfo_callback is_cancelled = [](void* cancel, curl_off_t, curl_off_t, curl_off_t,
                                                 curl_off_t) {
    const auto time = static_cast<const decltype(cancel_at_)*>(cancel)->load();
    return std::chrono::steady_clock::now() >= time ? 1 : 0;
  };
  ::curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, is_cancelled);
  ::curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &cancel_at_);
  ::curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
  std::string error(CURL_ERROR_SIZE, '\0');
  ::curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, error.data());

  const CURLcode code = ::curl_easy_perform(curl);
  if (code == CURLE_OK) {
    ::curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &answer.status);
    curl_off_t wait = 0;
    ::curl_easy_getinfo(curl, CURLINFO_RETRY_AFTER, &wait);
    answer.retry_after = std::chrono::seconds(wait);
  } else if (code == CURLE_WRITE_ERROR) {
    answer.error = "the answer has more than " + std::to_string(kLargestAnswer >> 20) + " MiB";
  } else {
    answer.error = error[0] != '\0' ? error.c_str() : ::curl_easy_strerror(code);
  }
  ::curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, nullptr);
  return answer;
}

}  // namespace lockstep::mlflow::internal

#include <algorithm>
#include <string_view>
#include <sys/un.h>

#include <c10/util/Exception.h>

#include <lockstep/base/text/hex.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/transport/internal/peer_address.h>

namespace lockstep::transport::internal {
namespace {

// An abstract name follows a zero byte.
constexpr size_t kLongestSocketName = sizeof(sockaddr_un::sun_path) - 2;

/// Takes the text up to the next space off `rest`; empty if there is none.
std::string_view take_word(std::string_view& rest) {
  const size_t space = rest.find(' ');
  if (space == std::string_view::npos) return {};
  const std::string_view word = rest.substr(0, space);
  rest.remove_prefix(space + 1);
  return word;
}

bool read_token(std::string_view word, Token& token) {
  const auto bytes = from_hex(word);
  if (!bytes || bytes->size() != token.size()) return false;
  std::copy(bytes->begin(), bytes->end(), token.begin());
  return true;
}

bool read_process_identity(const std::string& text, ProcessIdentity& process) {
  try {
    process = ProcessIdentity::parse(text);
    return true;
  } catch (const c10::ValueError&) {
    return false;  // parse() shows the whole address instead
  }
}

}  // namespace

std::string PeerAddress::to_string() const {
  return std::to_string(uid) + ' ' + socket_name + ' ' + to_hex(token) + ' ' +
         std::to_string(generation.number) + ' ' + std::to_string(generation.run) + ' ' + process.to_string();
}

PeerAddress PeerAddress::parse(const std::string& text) {
  PeerAddress address;
  std::string_view rest = text;
  const auto uid = parse_number<uid_t>(take_word(rest));
  address.socket_name = take_word(rest);
  const bool name = !address.socket_name.empty() && address.socket_name.size() <= kLongestSocketName;
  const bool token = read_token(take_word(rest), address.token);
  const auto generation = parse_number<uint64_t>(take_word(rest));
  const auto run = parse_number<uint64_t>(take_word(rest));
  const bool good =
      uid && name && token && generation && run && read_process_identity(std::string(rest), address.process);
  TORCH_CHECK_WITH(DistBackendError, good, "malformed peer address '", text,
                   "'; do all ranks run the same version of Lockstep?");
  address.uid = *uid;
  address.generation = {.number = *generation, .run = *run};
  return address;
}

}  // namespace lockstep::transport::internal

#include <algorithm>
#include <concepts>
#include <cstring>
#include <type_traits>
#include <utility>

#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {
namespace {

constexpr uint8_t kStatusTag = 0x51;
constexpr uint8_t kOrderTag = 0x52;
constexpr uint8_t kReportTag = 0x53;
constexpr size_t kMostHostBytes = 256;
constexpr size_t kMostRoleBytes = 256;
constexpr size_t kMostOptionsBytes = 256;
constexpr size_t kMostTextBytes = 12000;
constexpr size_t kMostHeadBytes = 2000;  // of a text whose middle is left out

/// Little-endian numbers; texts with their length in front.
class MessageWriter {
 public:
  explicit MessageWriter(uint8_t tag) { number(tag); }
  template <std::integral T>
  void number(T value) {
    auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_ += static_cast<char>(static_cast<uint64_t>(bits) >> (8 * i) & 0xff);
    }
  }
  void name(const std::array<uint8_t, 16>& value) {
    bytes_.append(reinterpret_cast<const char*>(value.data()), value.size());
  }
  void text(std::string_view value, size_t most) {
    value = value.substr(0, most);
    number(static_cast<uint16_t>(value.size()));
    bytes_ += value;
  }
  void rest(std::string_view value) { bytes_ += value; }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads what MessageWriter wrote. Past the end, or beyond a bound, it is broken and all that it reads is 0.
class MessageReader {
 public:
  MessageReader(std::string_view bytes, uint8_t tag, size_t most = kMostMessageBytes) : rest_(bytes) {
    if (bytes.size() > most || number<uint8_t>() != tag) broken_ = true;
  }
  template <std::integral T>
  T number() {
    if (!has(sizeof(T))) return 0;
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      bits |= static_cast<uint64_t>(static_cast<uint8_t>(rest_[i])) << (8 * i);
    }
    rest_.remove_prefix(sizeof(T));
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(bits));
  }
  int32_t number_in(int32_t low, int32_t high) {
    const auto value = number<int32_t>();
    if (value < low || value > high) broken_ = true;
    return value;
  }
  template <typename Enum>
  Enum choice(Enum last) {
    const auto value = number<uint8_t>();
    if (value > static_cast<uint8_t>(last)) broken_ = true;
    return broken_ ? Enum{} : static_cast<Enum>(value);
  }
  std::array<uint8_t, 16> name() {
    std::array<uint8_t, 16> value = {};
    if (!has(value.size())) return value;
    std::memcpy(value.data(), rest_.data(), value.size());
    rest_.remove_prefix(value.size());
    return value;
  }
  std::string text(size_t most) {
    const auto size = number<uint16_t>();
    if (size > most || !has(size)) {
      broken_ = true;
      return {};
    }
    std::string value(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return value;
  }
  std::string rest() { return std::string(std::exchange(rest_, {})); }
  /// Whether all of it was read, and all was in order.
  bool complete() const { return !broken_ && rest_.empty(); }

 private:
  bool has(size_t size) {
    if (rest_.size() < size) broken_ = true;
    return !broken_;
  }

  std::string_view rest_;
  bool broken_ = false;
};

/// A text that is too long without its middle: a failure's report says first who has failed, and last what came last.
std::string shortened(const std::string& text) {
  constexpr std::string_view kGap = "\n    …\n";
  if (text.size() <= kMostTextBytes) return text;
  const size_t tail = kMostTextBytes - kMostHeadBytes - kGap.size();
  return text.substr(0, kMostHeadBytes).append(kGap).append(text, text.size() - tail);
}

enum class Flag : uint8_t { kNo, kYes };

constexpr int32_t kMostRanks = 1 << 30;
constexpr int32_t kMostWorkersOfHost = 65536;

}  // namespace

std::string encode(const Status& status) {
  MessageWriter writer(kStatusTag);
  writer.name(status.id);
  writer.number(status.sent_at);
  writer.text(status.host, kMostHostBytes);
  writer.number(status.node_rank);
  writer.number(status.nproc);
  writer.text(status.role, kMostRoleBytes);
  writer.text(status.options, kMostOptionsBytes);
  writer.number(static_cast<uint8_t>(status.phase));
  writer.number(status.generation);
  writer.number(status.order);
  writer.number(status.exit_status);
  writer.number(status.leaving);
  writer.number(status.culprit);
  writer.text(shortened(status.failure), kMostTextBytes);
  writer.number(status.answers);
  writer.number(static_cast<uint8_t>(status.watches));
  return writer.take();
}

std::string encode(const Order& order) {
  MessageWriter writer(kOrderTag);
  writer.name(order.job);
  writer.number(order.number);
  writer.number(order.status_sent_at);
  writer.number(static_cast<uint8_t>(order.command));
  writer.number(order.question);
  writer.number(static_cast<uint8_t>(order.watched));
  writer.number(order.place.generation);
  writer.number(order.place.group_rank);
  writer.number(order.place.group_size);
  writer.number(order.place.first_rank);
  writer.number(order.place.world_size);
  writer.number(order.place.store_port);
  writer.number(order.place.first_role_rank);
  writer.number(order.place.role_world_size);
  writer.number(order.generation);
  writer.number(order.exit_status);
  writer.text(order.reason, kMostTextBytes);
  return writer.take();
}

std::string encode(const Report& report) {
  MessageWriter writer(kReportTag);
  writer.name(report.agent);
  writer.rest(report.text);
  return writer.take();
}

std::optional<Status> decode_status(std::string_view bytes) {
  MessageReader reader(bytes, kStatusTag);
  Status status;
  status.id = reader.name();
  status.sent_at = reader.number<int64_t>();
  status.host = reader.text(kMostHostBytes);
  status.node_rank = reader.number_in(-1, kMostRanks);
  status.nproc = reader.number_in(1, kMostWorkersOfHost);
  status.role = reader.text(kMostRoleBytes);
  status.options = reader.text(kMostOptionsBytes);
  status.phase = reader.choice(HostPhase::kFailed);
  status.generation = reader.number<uint64_t>();
  status.order = reader.number<uint64_t>();
  status.exit_status = reader.number_in(0, 255);
  status.leaving = reader.number_in(0, 64);
  status.culprit = reader.number_in(-1, kMostRanks);
  status.failure = reader.text(kMostTextBytes);
  status.answers = reader.number<uint64_t>();
  status.watches = reader.choice(Flag::kYes) == Flag::kYes;
  return reader.complete() ? std::optional(status) : std::nullopt;
}

std::optional<Order> decode_order(std::string_view bytes) {
  MessageReader reader(bytes, kOrderTag);
  Order order;
  order.job = reader.name();
  order.number = reader.number<uint64_t>();
  order.status_sent_at = reader.number<int64_t>();
  order.command = reader.choice(Command::kYield);
  order.question = reader.number<uint64_t>();
  order.watched = reader.choice(Flag::kYes) == Flag::kYes;
  order.place.generation = reader.number<uint64_t>();
  order.place.group_rank = reader.number_in(0, kMostRanks);
  order.place.group_size = reader.number_in(1, kMostRanks);
  order.place.first_rank = reader.number_in(0, kMostRanks);
  order.place.world_size = reader.number_in(1, kMostRanks);
  order.place.store_port = reader.number<uint16_t>();
  order.place.first_role_rank = reader.number_in(0, kMostRanks);
  order.place.role_world_size = reader.number_in(1, kMostRanks);
  order.generation = reader.number<uint64_t>();
  order.exit_status = reader.number_in(0, 255);
  order.reason = reader.text(kMostTextBytes);
  const Place& place = order.place;
  const bool inside = place.group_rank < place.group_size && place.first_rank < place.world_size &&
                      place.first_role_rank < place.role_world_size;
  return reader.complete() && inside ? std::optional(order) : std::nullopt;
}

std::optional<Report> decode_report(std::string_view bytes) {
  MessageReader reader(bytes, kReportTag, kMostReportBytes);
  Report report;
  report.agent = reader.name();
  report.text = reader.rest();
  return reader.complete() ? std::optional(report) : std::nullopt;
}

}  // namespace lockstep::launch

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>
#include <zlib.h>

#include <lockstep/base/errors.h>
#include <lockstep/serialization/zip_directory.h>

namespace lockstep::serialization {
namespace {

// Sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (its end) of the specification.
constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kCentralHeader = 0x02014b50;
constexpr uint32_t kEnd = 0x06054b50;
constexpr uint32_t kEnd64 = 0x06064b50;
constexpr uint32_t kEnd64Locator = 0x07064b50;
constexpr size_t kLocalHeaderSize = 30;
constexpr size_t kCentralHeaderSize = 46;
constexpr size_t kEndSize = 22;
constexpr size_t kEnd64Size = 56;
constexpr size_t kEnd64LocatorSize = 20;
constexpr uint16_t kZip64Extra = 1;
constexpr uint16_t kEncrypted = 1;

template <class T>
T number_at(std::string_view bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));  // little-endian, as this machine
  return value;
}

std::string read_bytes(const ByteSource& source, uint64_t offset, uint64_t size) {
  std::string bytes(size, '\0');
  source.read(bytes.data(), bytes.size(), offset);
  return bytes;
}

struct Place {
  uint64_t offset, size, count;
};

/// Where the central directory is, by the record of more than 32 bits, if there is one.
std::optional<Place> find_large_directory(const ByteSource& source, uint64_t end) {
  if (end < kEnd64LocatorSize) return {};
  const std::string locator = read_bytes(source, end - kEnd64LocatorSize, kEnd64LocatorSize);
  if (number_at<uint32_t>(locator, 0) != kEnd64Locator) return {};
  const auto offset = number_at<uint64_t>(locator, 8);
  LOCKSTEP_CHECK_FILE(
      offset <= source.size() && source.size() - offset >= kEnd64Size + kEnd64LocatorSize + kEndSize,
      source.name(), " is damaged: the end of its zip directory is outside of the file");
  const std::string record = read_bytes(source, offset, kEnd64Size);
  LOCKSTEP_CHECK_FILE(number_at<uint32_t>(record, 0) == kEnd64 &&
                          number_at<uint64_t>(record, 24) == number_at<uint64_t>(record, 32),
                      source.name(), " is damaged: its zip directory has no proper end");
  return Place{number_at<uint64_t>(record, 48), number_at<uint64_t>(record, 40),
               number_at<uint64_t>(record, 32)};
}

Place find_directory(const ByteSource& source) {
  const uint64_t tail_size = std::min<uint64_t>(source.size(), kEndSize + UINT16_MAX);
  const std::string tail = read_bytes(source, source.size() - tail_size, tail_size);
  for (size_t i = tail.size(); i-- > 0;) {
    if (tail.size() - i < kEndSize || number_at<uint32_t>(tail, i) != kEnd) continue;
    if (number_at<uint16_t>(tail, i + 20) != tail.size() - i - kEndSize) continue;  // the comment's length
    if (const auto large = find_large_directory(source, source.size() - tail.size() + i)) return *large;
    return {number_at<uint32_t>(tail, i + 16), number_at<uint32_t>(tail, i + 12),
            number_at<uint16_t>(tail, i + 10)};
  }
  LOCKSTEP_CHECK_FILE(
      false, source.name(),
      " is damaged or truncated: it does not end as a zip archive, which torch.save writes, does");
}

/// The numbers of a central header that did not fit into 32 bits are in its extra field, in this order.
void read_large_numbers(std::string_view extra, std::vector<uint64_t*> numbers) {
  numbers.erase(std::remove_if(numbers.begin(), numbers.end(),
                               [](const uint64_t* number) { return *number != UINT32_MAX; }),
                numbers.end());
  while (extra.size() >= 4 && !numbers.empty()) {
    const size_t size = number_at<uint16_t>(extra, 2);
    if (size > extra.size() - 4) return;
    if (number_at<uint16_t>(extra, 0) == kZip64Extra) {
      for (size_t i = 0; i < numbers.size() && 8 * (i + 1) <= size; ++i) {
        *numbers[i] = number_at<uint64_t>(extra, 4 + 8 * i);
      }
      return;
    }
    extra.remove_prefix(4 + size);
  }
}

}  // namespace

ZipDirectory::ZipDirectory(const ByteSource& source) : source_(source) {
  const Place place = find_directory(source);
  LOCKSTEP_CHECK_FILE(place.offset <= source.size() && place.size <= source.size() - place.offset &&
                          place.count <= place.size / kCentralHeaderSize,
                      source.name(), " is damaged: its zip directory is outside of the file");
  read_entries(place.offset, place.size, place.count);
  check_overlaps(place.offset);
}

void ZipDirectory::read_entries(uint64_t offset, uint64_t size, uint64_t count) {
  const std::string directory = read_bytes(source_, offset, size);
  std::string_view rest = directory;
  for (uint64_t i = 0; i < count; ++i) {
    LOCKSTEP_CHECK_FILE(rest.size() >= kCentralHeaderSize && number_at<uint32_t>(rest, 0) == kCentralHeader,
                        source_.name(), " is damaged: entry ", i, " of its zip directory is none");
    const size_t name_size = number_at<uint16_t>(rest, 28), extra_size = number_at<uint16_t>(rest, 30);
    const size_t total = kCentralHeaderSize + name_size + extra_size + number_at<uint16_t>(rest, 32);
    LOCKSTEP_CHECK_FILE(total <= rest.size(), source_.name(), " is damaged: entry ", i,
                        " of its zip directory is longer than the directory");
    const std::string name(rest.substr(kCentralHeaderSize, name_size));
    Entry entry{.header = number_at<uint32_t>(rest, 42),
                .size = number_at<uint32_t>(rest, 24),
                .stored_size = number_at<uint32_t>(rest, 20),
                .crc32 = number_at<uint32_t>(rest, 16)};
    read_large_numbers(rest.substr(kCentralHeaderSize + name_size, extra_size),
                       {&entry.size, &entry.stored_size, &entry.header});
    entry.is_plain = (number_at<uint16_t>(rest, 8) & kEncrypted) == 0 && number_at<uint16_t>(rest, 10) == 0 &&
                     entry.stored_size == entry.size;
    LOCKSTEP_CHECK_FILE(entries_.emplace(name, entry).second, source_.name(), " has '", name, "' twice");
    rest.remove_prefix(total);
  }
  LOCKSTEP_CHECK_FILE(rest.empty(), source_.name(), " is damaged: its zip directory goes on past its end");
}

/// Bytes belong to one entry, so that reading all of them takes no more memory than the file has bytes.
void ZipDirectory::check_overlaps(uint64_t end) const {
  std::vector<std::pair<uint64_t, const std::string*>> by_place;
  for (const auto& [name, entry] : entries_) by_place.emplace_back(entry.header, &name);
  std::sort(by_place.begin(), by_place.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < by_place.size(); ++i) {
    const std::string& name = *by_place[i].second;
    const uint64_t next = i + 1 < by_place.size() ? by_place[i + 1].first : end;
    const uint64_t header = kLocalHeaderSize + name.size();
    LOCKSTEP_CHECK_FILE(by_place[i].first <= next && next - by_place[i].first >= header &&
                            entries_.at(name).stored_size <= next - by_place[i].first - header,
                        source_.name(), " is damaged: '", name, "' has bytes of another entry");
  }
}

void ZipDirectory::read(const std::string& name, void* data) const {
  const Entry& entry = entries_.at(name);
  LOCKSTEP_CHECK_FILE(entry.is_plain, source_.name(), ": '", name,
                      "' is compressed or encrypted, as torch.save writes nothing; or the file is damaged");
  const std::string header = read_bytes(source_, entry.header, kLocalHeaderSize + name.size());
  const uint64_t begin =
      entry.header + kLocalHeaderSize + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
  LOCKSTEP_CHECK_FILE(number_at<uint32_t>(header, 0) == kLocalHeader &&
                          number_at<uint16_t>(header, 26) == name.size() &&
                          header.compare(kLocalHeaderSize, name.size(), name) == 0 &&
                          begin <= source_.size() && entry.size <= source_.size() - begin,
                      source_.name(), " is damaged: '", name, "' is not where the zip directory says");
  source_.read(data, entry.size, begin);
  const auto crc = static_cast<uint32_t>(crc32_z(0, static_cast<const Bytef*>(data), entry.size));
  // torch.serialization.set_crc32_options(False) leaves zeros.
  LOCKSTEP_CHECK_FILE(crc == entry.crc32 || entry.crc32 == 0, source_.name(),
                      " is damaged: the checksum of '", name, "' is wrong");
}

}  // namespace lockstep::serialization

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

/// Reading zip archives as torch.save writes them: stored, not compressed, in one part. LibTorch's own reader
/// (caffe2/serialize) checks no checksums and believes the sizes that it reads.
/// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
namespace lockstep::serialization {

/// Bytes that can be read at any place: of a file or in memory.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual uint64_t size() const = 0;
  /// [offset, offset + bytes) lies within size(). Throws CheckpointError.
  virtual void read(void* data, size_t bytes, uint64_t offset) const = 0;
  /// For messages: the file's path.
  virtual const std::string& name() const = 0;
};

/// An archive's directory. Throws CheckpointError, that names the file and what is wrong, for anything but an
/// intact archive whose entries don't overlap. The source must outlive it. Thread-safe.
class ZipDirectory {
 public:
  struct Entry {
    uint64_t header = 0;  ///< where the entry begins
    uint64_t size = 0;
    uint64_t stored_size = 0;  ///< another one where it is compressed
    uint32_t crc32 = 0;
    bool is_plain = true;  ///< neither compressed nor encrypted
  };

  explicit ZipDirectory(const ByteSource& source);

  const std::map<std::string, Entry>& entries() const { return entries_; }
  /// Reads all of the entry and checks it; only plain ones can be read. `data` has room for entry.size bytes.
  void read(const std::string& name, void* data) const;

 private:
  void read_entries(uint64_t offset, uint64_t size, uint64_t count);
  void check_overlaps(uint64_t end) const;

  const ByteSource& source_;
  std::map<std::string, Entry> entries_;
};

}  // namespace lockstep::serialization

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/serialization/pickle/format.h>

namespace lockstep::pickle {

/// One pickle under construction. Containers and tensors are memoized by identity, so each is written once,
/// however often it occurs. Where a tensor's elements go is up to the subclass. Throws c10::ValueError, with
/// the place within the object, for what can't be written.
class Writer {
 public:
  /// `protocol`: 4, or 2, which is what torch.load(weights_only=True) reads.
  Writer(int protocol, size_t max_bytes) : protocol_(protocol), max_bytes_(max_bytes) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  virtual ~Writer() = default;

  /// The object's pickle. Called once.
  std::string finish(const c10::IValue& object);

 protected:
  /// The strided tensor on the CPU, or an error.
  virtual at::Tensor to_cpu(const at::Tensor& tensor) const = 0;
  /// Writes what unpickling makes a storage of: the elements of a tensor without gaps, in memory's order.
  virtual void write_storage(const at::Tensor& dense) = 0;

  void write_integer(int64_t value);
  void write_string(std::string_view text);
  /// A string as protocol 2 knows it.
  void write_long_string(std::string_view text);
  /// A tuple of integers.
  void write_integers(at::IntArrayRef values);
  /// The names are literals, and known by their addresses.
  void put_global(std::string_view module, std::string_view name);

  void put(Opcode opcode) { put_raw(static_cast<uint8_t>(opcode)); }
  template <class T>
  void put_raw(T value) {
    put_bytes({reinterpret_cast<const char*>(&value), sizeof(value)});
  }
  void put_bytes(std::string_view bytes);
  /// The opcodes for lengths of 1, 4 and 8 bytes.
  struct SizedOpcodes {
    Opcode with1, with4, with8;
  };
  void put_sized(size_t size, SizedOpcodes opcodes);

  void memoize(const void* identity);
  /// Writes a reference to what was memoized under the identity; false if nothing was.
  bool put_from_memo(const void* identity);

  size_t max_bytes() const { return max_bytes_; }
  std::string take_bytes() { return std::move(bytes_); }
  [[noreturn]] void fail(const std::string& reason) const;
  [[noreturn]] void fail_size() const;

 private:
  /// A step from a container to its element: a dictionary's key, or an index.
  struct Step {
    const c10::IValue* key;
    size_t index;
  };

  void write(const c10::IValue& value);
  void write_double(double value);
  void write_complex(c10::complex<double> value);
  void write_device(const c10::Device& device);
  void write_list(const c10::IValue& value);
  void write_dict(const c10::IValue& value);
  void write_item(const c10::IValue& key, const c10::IValue& value);
  void write_tuple(const c10::IValue& value);
  void write_element(Step step, const c10::IValue& value);
  void write_tensor(const at::Tensor& tensor);
  bool put_container_from_memo(const c10::IValue& value);

  const int protocol_;
  const size_t max_bytes_;
  std::string bytes_;
  std::unordered_map<const void*, uint32_t> memo_;
  std::vector<Step> path_;
  std::vector<const void*> open_;  // lists and dicts around the place where we are
};

/// The name of the type among them, or nothing.
std::string_view find_type_name(std::span<const NamedType> names, at::ScalarType type);

}  // namespace lockstep::pickle

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>

/// The machine that runs a pickle's opcodes, as far as objects need them. Python's Lib/pickle.py, class
/// _Unpickler, is the model.
namespace lockstep::pickle {

/// The Python names that a pickle may mention. None is ever looked up or called: the reader knows what each
/// stands for.
enum class Global : uint32_t {
  kLoadFromBytes,
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,
  kRebuildParameterWithState,
  kRebuildFromType,
  kTensor,
  kOrderedDict,
  kCounter,
  kComplex,
  kSize,
  kDevice,
  kEncode,
  kBytes,
  kStorageClasses = 100,  // + index in kStorageTypes; after the last: kUntypedStorage
  kDtypes = 200,          // + index in kNewTypes
};

/// What stands on the machine's stack and in its memo.
struct Slot {
  enum class Kind : uint8_t {
    kValue,      // value
    kBytes,      // index into the machine's pieces of the input, which are copied only when needed as a value
    kContainer,  // index into the machine's containers
    kGlobal,     // index is a Global
    kStorage,    // value is a tensor of one dimension over a whole storage
  };
  Kind kind = Kind::kValue;
  uint32_t index = 0;
  c10::IValue value;
};

/// The element type of a storage class; bytes for an untyped one, nothing for what is no such class.
std::optional<at::ScalarType> storage_type(const Slot& slot);

/// A list, dict or tuple. Its IValue is made ("sealed") when it is put into another container or is the
/// result; from then on it can't change, so that no container contains itself.
struct Container {
  enum class Type : uint8_t { kList, kDict, kTuple };
  Type type;
  bool sealed = false;
  bool ordered = false;  // an OrderedDict, which may have attributes
  int depth = 1;
  std::vector<Slot> slots;  // elements; keys and values in turn. Tuples keep theirs, others until sealed
  c10::IValue value;        // once sealed
};

/// Runs pickles that stand one after the other in some bytes. What calls and persistent ids mean is up to the
/// subclass. Throws c10::DistBackendError for what it can't read. Memory: at most 64 MiB and 150 bytes for
/// each byte of the input, or 300 where keys were chosen to collide. The bytes outlive it.
class Machine {
 public:
  /// Starts at `begin`; `what` begins error messages.
  Machine(std::string_view bytes, std::string_view what, size_t begin)
      : bytes_(bytes), what_(what), position_(begin), opcode_position_(begin) {}
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  virtual ~Machine() = default;

 protected:
  /// Runs the next pickle to its end and returns its object.
  Slot run();

  /// REDUCE: pushes what `function` makes of the arguments.
  virtual void call(Global function, const std::vector<Slot>& arguments) = 0;
  /// BINPERSID: pushes what the id names.
  virtual void load_persistent(const Slot& id) = 0;

  std::string_view take(size_t count);
  template <class T>
  T take_raw() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  bool at_end() const { return position_ == bytes_.size(); }
  size_t position() const { return position_; }
  std::string_view bytes() const { return bytes_; }
  std::string_view what() const { return what_; }

  /// Throws DistBackendError with the current opcode and its place.
  [[noreturn]] void fail(const std::string& reason) const;
  /// The same for what is no object.
  [[noreturn]] void fail_unknown(const std::string& what) const;

  void push(c10::IValue value) { push_slot({Slot::Kind::kValue, 0, std::move(value)}); }
  void push_slot(Slot slot) { stack_.push_back(std::move(slot)); }
  /// An empty container, and its index.
  uint32_t push_container(Container::Type type);
  Container& container(uint32_t index) { return containers_[index]; }
  std::string_view piece(const Slot& bytes) const { return pieces_[bytes.index].text; }
  /// The slot as a value that won't change any more.
  c10::IValue value_of(const Slot& slot);
  /// The elements of a tuple, which need not be values; nullptr for anything else.
  const std::vector<Slot>* elements_of_tuple(const Slot& slot) const;

 private:
  struct Piece {
    std::string_view text;
    c10::IValue value;  // None until it was needed
  };

  template <class Length>
  std::string_view take_sized() {
    return take(take_raw<Length>());
  }
  std::string_view take_line();
  bool read_scalar(uint8_t opcode);
  bool read_memo(uint8_t opcode);
  bool read_container(uint8_t opcode);
  bool read_call(uint8_t opcode);
  int64_t to_integer(std::string_view little_endian) const;
  void push_string(std::string_view text);
  void push_bytes(std::string_view text);
  void push_global(std::string_view module, std::string_view name);
  void push_tuple(std::vector<Slot> slots);
  void put_memo(size_t index);
  void get_memo(size_t index);
  void extend(Container::Type type, std::vector<Slot> slots);
  void deepen(Container& container, const Slot& element) const;
  void seal(Container& container);
  Slot& top();
  Slot pop();
  std::vector<Slot> pop_many(size_t count);
  std::vector<Slot> pop_to_mark();
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  const std::string_view bytes_;
  const std::string_view what_;
  size_t position_;
  size_t opcode_position_;
  std::vector<Slot> stack_;
  std::vector<size_t> marks_;  // heights of the stack
  std::vector<Slot> memo_;
  std::deque<Container> containers_;
  size_t container_bytes_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace lockstep::pickle

#include <algorithm>
#include <array>
#include <bit>
#include <iomanip>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <lockstep/serialization/pickle/dict.h>
#include <lockstep/serialization/pickle/format.h>
#include <lockstep/serialization/pickle/machine.h>
#include <lockstep/serialization/pickle/object_pickle.h>

namespace lockstep::pickle {
namespace {

using c10::IValue;

struct NamedGlobal {
  std::string_view module, name;
  Global global;
};
constexpr std::array kGlobals{
    NamedGlobal{"torch.storage", "_load_from_bytes", Global::kLoadFromBytes},
    NamedGlobal{"torch._utils", "_rebuild_tensor_v2", Global::kRebuildTensorV2},
    NamedGlobal{"torch._utils", "_rebuild_tensor_v3", Global::kRebuildTensorV3},
    NamedGlobal{"torch._utils", "_rebuild_parameter", Global::kRebuildParameter},
    NamedGlobal{"torch._utils", "_rebuild_parameter_with_state", Global::kRebuildParameterWithState},
    NamedGlobal{"torch._tensor", "_rebuild_from_type_v2", Global::kRebuildFromType},
    NamedGlobal{"torch", "Tensor", Global::kTensor},
    NamedGlobal{"_codecs", "encode", Global::kEncode},
    NamedGlobal{"__builtin__", "bytes", Global::kBytes},
    NamedGlobal{"collections", "OrderedDict", Global::kOrderedDict},
    NamedGlobal{"collections", "Counter", Global::kCounter},
    NamedGlobal{"builtins", "complex", Global::kComplex},
    NamedGlobal{"__builtin__", "complex", Global::kComplex},
    NamedGlobal{"torch", "Size", Global::kSize},
    NamedGlobal{"torch", "device", Global::kDevice},
};

// The memory of a container and of what the machine notes of it, without the elements but for a dict's first.
constexpr size_t kDictBytes = 768;
constexpr size_t kListBytes = 256;
// Together, containers may take so much, whatever the input's size, and so much for each of its bytes. What
// Python writes stays below: a dict of one small number is 7 bytes at least.
constexpr size_t kFreeContainerBytes = size_t{64} << 20;
constexpr size_t kContainerBytesPerByte = 128;

constexpr Global offset_by(Global base, size_t index) {
  return static_cast<Global>(static_cast<uint32_t>(base) + static_cast<uint32_t>(index));
}

std::optional<Global> find_global(std::string_view module, std::string_view name) {
  for (const auto& entry : kGlobals) {
    if (entry.module == module && entry.name == name) return entry.global;
  }
  if (module == "torch.storage" && name == kUntypedStorage) {
    return offset_by(Global::kStorageClasses, kStorageTypes.size());
  }
  if (module != "torch") return {};
  for (size_t i = 0; i < kStorageTypes.size(); ++i) {
    if (kStorageTypes[i].name == name) return offset_by(Global::kStorageClasses, i);
  }
  for (size_t i = 0; i < kNewTypes.size(); ++i) {
    if (kNewTypes[i].name == name) return offset_by(Global::kDtypes, i);
  }
  return {};
}

/// What an opcode that the machine does not have stands for.
const char* describe(uint8_t opcode) {
  switch (opcode) {
    case '0':  // POP, POP_MARK
    case '1':
      return "a tuple that contains itself";
    case 'i':  // INST, OBJ, NEWOBJ, NEWOBJ_EX
    case 'o':
    case 0x81:
    case 0x92:
      return "an object of a Python class";
    case 'P':  // PERSID, BINPERSID
    case 'Q':
      return "a persistent id";
    case 'R':
      return "a call within a storage";
    case 0x82:  // EXT1, EXT2, EXT4
    case 0x83:
    case 0x84:
      return "an extension code";
    case 0x8b:
      return "an integer that does not fit into 64 bits";  // LONG4
    case 0x8f:                                             // EMPTY_SET, ADDITEMS
    case 0x90:
      return "a set";
    case 0x91:
      return "a frozenset";
    case 0x96:  // BYTEARRAY8, NEXT_BUFFER, READONLY_BUFFER
    case 0x97:
    case 0x98:
      return "a bytearray or a buffer";
    default:
      return "an opcode that protocols 2 to 5 have no use for";
  }
}

double to_double(std::string_view big_endian) {
  uint64_t bits = 0;
  for (const char byte : big_endian) bits = bits << 8 | static_cast<uint8_t>(byte);
  return std::bit_cast<double>(bits);
}

}  // namespace

std::optional<at::ScalarType> storage_type(const Slot& slot) {
  const size_t index = slot.index - static_cast<uint32_t>(Global::kStorageClasses);
  if (slot.kind != Slot::Kind::kGlobal || index > kStorageTypes.size()) return {};
  return index < kStorageTypes.size() ? kStorageTypes[index].type : at::kByte;
}

// ---- Bytes ----

std::string_view Machine::take(size_t count) {
  if (count > bytes_.size() - position_) {
    fail("the bytes end too early: " + std::to_string(count) + " more wanted, " +
         std::to_string(bytes_.size() - position_) + " there");
  }
  position_ += count;
  return bytes_.substr(position_ - count, count);
}

std::string_view Machine::take_line() {
  const size_t end = bytes_.find('\n', position_);
  if (end == std::string_view::npos) fail("a line that does not end");
  const auto line = take(end - position_);
  take(1);
  return line;
}

void Machine::fail(const std::string& reason) const {
  std::ostringstream message;
  message << what_ << " can't be read: byte " << opcode_position_;
  if (opcode_position_ < bytes_.size()) {
    const auto opcode = static_cast<uint8_t>(bytes_[opcode_position_]);
    message << ", opcode 0x" << std::hex << std::setw(2) << std::setfill('0') << int{opcode};
    if (opcode > ' ' && opcode < 0x7f) message << " '" << static_cast<char>(opcode) << "'";
  }
  message << ": " << reason;
  C10_THROW_ERROR(DistBackendError, message.str());
}

void Machine::fail_unknown(const std::string& what) const {
  fail(
      what +
      "; objects consist of None, bool, int, float, complex, str, bytes, list, dict, tuple, torch.Tensor and "
      "torch.device");
}

// ---- Opcodes ----

Slot Machine::run() {
  memo_.clear();  // each pickle has its own
  while (true) {
    opcode_position_ = position_;
    const auto opcode = take_raw<uint8_t>();
    if (opcode == kStop) break;
    if (!read_scalar(opcode) && !read_memo(opcode) && !read_container(opcode) && !read_call(opcode)) {
      fail_unknown(describe(opcode));
    }
  }
  if (!marks_.empty() || stack_.size() != 1) fail("the pickle ends with an unfinished object");
  return pop();
}

bool Machine::read_scalar(uint8_t opcode) {
  switch (opcode) {
    case kNone:
      push(IValue());
      return true;
    case kNewTrue:
      push(true);
      return true;
    case kNewFalse:
      push(false);
      return true;
    case kBinInt:
      push(int64_t{take_raw<int32_t>()});
      return true;
    case kBinInt1:
      push(int64_t{take_raw<uint8_t>()});
      return true;
    case kBinInt2:
      push(int64_t{take_raw<uint16_t>()});
      return true;
    case kLong1:
      push(to_integer(take_sized<uint8_t>()));
      return true;
    case kBinFloat:
      push(to_double(take(8)));
      return true;
    case kShortBinUnicode:
      push_string(take_sized<uint8_t>());
      return true;
    case kBinUnicode:
      push_string(take_sized<uint32_t>());
      return true;
    case kBinUnicode8:
      push_string(take_sized<uint64_t>());
      return true;
    case kShortBinBytes:
      push_bytes(take_sized<uint8_t>());
      return true;
    case kBinBytes:
      push_bytes(take_sized<uint32_t>());
      return true;
    case kBinBytes8:
      push_bytes(take_sized<uint64_t>());
      return true;
    default:
      return false;
  }
}

int64_t Machine::to_integer(std::string_view little_endian) const {
  if (little_endian.size() > sizeof(int64_t)) fail("an integer that does not fit into 64 bits");
  if (little_endian.empty()) return 0;
  int64_t value = static_cast<signed char>(little_endian.back()) < 0 ? -1 : 0;
  std::memcpy(&value, little_endian.data(), little_endian.size());
  return value;
}

void Machine::push_string(std::string_view text) {
  if (!is_utf8(text)) fail("a str that is not UTF-8");
  push(std::string(text));
}

void Machine::push_bytes(std::string_view text) {
  pieces_.push_back({text, {}});
  push_slot({Slot::Kind::kBytes, static_cast<uint32_t>(pieces_.size() - 1), {}});
}

bool Machine::read_memo(uint8_t opcode) {
  switch (opcode) {
    case kProtocol: {
      const auto protocol = take_raw<uint8_t>();
      if (protocol < 2 || protocol > 5) fail("protocol " + std::to_string(protocol) + "; 2 to 5 are known");
      return true;
    }
    case kFrame:  // the frame's length helps readers of files
      if (take_raw<uint64_t>() > bytes_.size() - position_) fail("a frame that is longer than the bytes");
      return true;
    case kMemoize:
      put_memo(memo_.size());
      return true;
    case kBinPut:
      put_memo(take_raw<uint8_t>());
      return true;
    case kLongBinPut:
      put_memo(take_raw<uint32_t>());
      return true;
    case kBinGet:
      get_memo(take_raw<uint8_t>());
      return true;
    case kLongBinGet:
      get_memo(take_raw<uint32_t>());
      return true;
    default:
      return false;
  }
}

/// Python counts up, so nothing is lost by insisting on it.
void Machine::put_memo(size_t index) {
  if (index != memo_.size()) fail("memo entry " + std::to_string(index) + " is out of order");
  memo_.push_back(top());
}

void Machine::get_memo(size_t index) {
  if (index >= memo_.size()) fail("memo entry " + std::to_string(index) + " does not exist");
  push_slot(memo_[index]);
}

bool Machine::read_container(uint8_t opcode) {
  switch (opcode) {
    case kMark:
      marks_.push_back(stack_.size());
      return true;
    case kEmptyList:
      push_container(Container::Type::kList);
      return true;
    case kEmptyDict:
      push_container(Container::Type::kDict);
      return true;
    case kEmptyTuple:
      push_tuple({});
      return true;
    case kTuple1:
      push_tuple(pop_many(1));
      return true;
    case kTuple2:
      push_tuple(pop_many(2));
      return true;
    case kTuple3:
      push_tuple(pop_many(3));
      return true;
    case kTuple:
      push_tuple(pop_to_mark());
      return true;
    case kAppend:
      extend(Container::Type::kList, pop_many(1));
      return true;
    case kAppends:
      extend(Container::Type::kList, pop_to_mark());
      return true;
    case kSetItem:
      extend(Container::Type::kDict, pop_many(2));
      return true;
    case kSetItems:
      extend(Container::Type::kDict, pop_to_mark());
      return true;
    default:
      return false;
  }
}

bool Machine::read_call(uint8_t opcode) {
  switch (opcode) {
    case kGlobal: {
      const auto module = take_line();
      push_global(module, take_line());
      return true;
    }
    case kStackGlobal: {
      const std::vector<Slot> names = pop_many(2);
      const IValue module = value_of(names[0]), name = value_of(names[1]);
      if (!module.isString() || !name.isString()) fail("a name that is no str");
      push_global(module.toStringView(), name.toStringView());
      return true;
    }
    case kBinPersistentId:
      load_persistent(pop());
      return true;
    case kReduce: {
      const Slot arguments = pop();
      const Slot function = pop();
      const auto* elements = elements_of_tuple(arguments);
      if (function.kind != Slot::Kind::kGlobal || !elements) fail("a call of what is no function");
      call(static_cast<Global>(function.index), std::vector<Slot>(*elements));
      return true;
    }
    case kBuild: {  // attributes, such as _metadata of a state_dict: left out
      pop();
      const Slot& object = top();
      if (object.kind != Slot::Kind::kContainer || !containers_[object.index].ordered) {
        fail_unknown("an object with attributes");
      }
      return true;
    }
    default:
      return false;
  }
}

void Machine::push_global(std::string_view module, std::string_view name) {
  const auto global = find_global(module, name);
  if (!global)
    fail_unknown("Python's " + std::string(module.substr(0, 100)) + "." + std::string(name.substr(0, 100)));
  push_slot({Slot::Kind::kGlobal, static_cast<uint32_t>(*global), {}});
}

// ---- The stack ----

Slot& Machine::top() {
  if (stack_.size() <= floor()) fail("nothing on the stack");
  return stack_.back();
}

Slot Machine::pop() {
  Slot slot = std::move(top());
  stack_.pop_back();
  return slot;
}

std::vector<Slot> Machine::pop_many(size_t count) {
  if (stack_.size() - floor() < count) fail("too little on the stack");
  const auto first = stack_.end() - static_cast<ptrdiff_t>(count);
  std::vector<Slot> slots(std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
  stack_.erase(first, stack_.end());
  return slots;
}

std::vector<Slot> Machine::pop_to_mark() {
  if (marks_.empty()) fail("no mark on the stack");
  auto slots = pop_many(stack_.size() - marks_.back());
  marks_.pop_back();
  return slots;
}

// ---- Containers ----

uint32_t Machine::push_container(Container::Type type) {
  // A byte makes a container, and c10's dict takes hundreds, with one item more than an empty one.
  container_bytes_ += type == Container::Type::kDict ? kDictBytes : kListBytes;
  if (container_bytes_ > kFreeContainerBytes + kContainerBytesPerByte * bytes_.size()) {
    fail("lists, dicts and tuples that take too much memory for " + std::to_string(bytes_.size()) + " bytes");
  }
  containers_.emplace_back().type = type;
  const auto index = static_cast<uint32_t>(containers_.size() - 1);
  push_slot({Slot::Kind::kContainer, index, {}});
  return index;
}

const std::vector<Slot>* Machine::elements_of_tuple(const Slot& slot) const {
  if (slot.kind != Slot::Kind::kContainer) return nullptr;
  const Container& container = containers_[slot.index];
  return container.type == Container::Type::kTuple ? &container.slots : nullptr;
}

/// A tuple may hold what is no value, as long as it serves only for the arguments of a call; so may a tuple
/// in it.
void Machine::push_tuple(std::vector<Slot> slots) {
  for (const Slot& slot : slots) {
    if (slot.kind == Slot::Kind::kContainer && elements_of_tuple(slot) == nullptr) value_of(slot);
  }
  Container& tuple = containers_[push_container(Container::Type::kTuple)];
  for (const Slot& slot : slots) deepen(tuple, slot);
  tuple.slots = std::move(slots);
}

void Machine::extend(Container::Type type, std::vector<Slot> slots) {
  if (type == Container::Type::kDict && slots.size() % 2 != 0) fail("a key without a value");
  for (Slot& slot : slots) slot.value = value_of(slot);
  const Slot& target = top();
  if (target.kind != Slot::Kind::kContainer || containers_[target.index].type != type) {
    fail(type == Container::Type::kList ? "elements for what is no list" : "items for what is no dict");
  }
  Container& container = containers_[target.index];
  if (container.sealed) fail("a container that contains itself, or changes after it was used");
  for (Slot& slot : slots) {
    deepen(container, slot);
    slot.kind = Slot::Kind::kValue;
  }
  container.slots.insert(container.slots.end(), std::make_move_iterator(slots.begin()),
                         std::make_move_iterator(slots.end()));
}

void Machine::deepen(Container& container, const Slot& element) const {
  if (element.kind != Slot::Kind::kContainer) return;
  container.depth = std::max(container.depth, containers_[element.index].depth + 1);
  if (container.depth > kMaxObjectDepth) {
    fail("containers nested deeper than " + std::to_string(kMaxObjectDepth) + " levels");
  }
}

IValue Machine::value_of(const Slot& slot) {
  switch (slot.kind) {
    case Slot::Kind::kValue:
      return slot.value;
    case Slot::Kind::kBytes: {
      Piece& piece = pieces_[slot.index];
      if (piece.value.isNone()) piece.value = std::string(piece.text);
      return piece.value;
    }
    case Slot::Kind::kContainer: {
      Container& container = containers_[slot.index];
      if (!container.sealed) seal(container);
      return container.value;
    }
    default:
      fail_unknown("a storage, function or type");
  }
}

void Machine::seal(Container& container) {
  std::vector<IValue> values;
  values.reserve(container.slots.size());
  // Lists and dicts are sealed already; tuples in tuples nest no deeper than kMaxObjectDepth.
  for (const Slot& slot : container.slots) values.push_back(value_of(slot));
  container.sealed = true;
  if (container.type == Container::Type::kTuple) {
    container.value = c10::ivalue::Tuple::create(std::move(values));
    return;
  }
  container.slots = {};
  if (container.type == Container::Type::kList) {
    c10::impl::GenericList list(c10::AnyType::get());
    list.reserve(values.size());
    for (IValue& value : values) list.push_back(std::move(value));
    container.value = std::move(list);
    return;
  }
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  if (const char* problem = fill_dict(dict, std::move(values))) fail(problem);
  container.value = std::move(dict);
}

}  // namespace lockstep::pickle

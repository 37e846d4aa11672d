#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <c10/core/ScalarType.h>

/// What the writer and the reader of pickles share: opcodes (Python's pickletools.py) and the layout of a
/// tensor.
///
/// A tensor is a call (REDUCE) of torch._utils._rebuild_tensor_v2 or _v3 on (storage, offset, sizes, strides,
/// requires_grad, hooks[, dtype]); the storage is a call of torch.storage._load_from_bytes on what torch.save
/// wrote in its old format: four pickles (magic number, version, properties of the machine, a persistent id
/// that names the storage's class, key, place and number of elements), a fifth with the list of keys, the
/// number of elements again as 8 bytes, and the elements. torch/_tensor.py, torch/serialization.py:
/// _legacy_save.
namespace lockstep::pickle {

enum Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersistentId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyTuple = ')',
  kEmptyList = ']',
  kEmptyDict = '}',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProtocol = 0x80,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

/// The first two pickles of a storage: torch/serialization.py's MAGIC_NUMBER and PROTOCOL_VERSION (1001).
constexpr std::string_view kStorageMagic{
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.", 21};

struct NamedType {
  at::ScalarType type;
  std::string_view name;
};

/// Types with a storage class torch.NAME of their own.
constexpr std::array<NamedType, 12> kStorageTypes{{
    {at::kDouble, "DoubleStorage"},
    {at::kFloat, "FloatStorage"},
    {at::kHalf, "HalfStorage"},
    {at::kBFloat16, "BFloat16Storage"},
    {at::kLong, "LongStorage"},
    {at::kInt, "IntStorage"},
    {at::kShort, "ShortStorage"},
    {at::kChar, "CharStorage"},
    {at::kByte, "ByteStorage"},
    {at::kBool, "BoolStorage"},
    {at::kComplexDouble, "ComplexDoubleStorage"},
    {at::kComplexFloat, "ComplexFloatStorage"},
}};
/// Of other types Python writes the bytes, as torch.storage.NAME; the dtype is then an argument of
/// _rebuild_tensor_v3.
constexpr std::string_view kUntypedStorage = "UntypedStorage";

/// These dtypes, torch.NAME. torch/storage.py: _new_dtypes.
constexpr std::array<NamedType, 10> kNewTypes{{
    {at::kUInt16, "uint16"},
    {at::kUInt32, "uint32"},
    {at::kUInt64, "uint64"},
    {at::kComplexHalf, "complex32"},
    {at::kFloat8_e5m2, "float8_e5m2"},
    {at::kFloat8_e4m3fn, "float8_e4m3fn"},
    {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
    {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
    {at::kFloat8_e8m0fnu, "float8_e8m0fnu"},
    {at::ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2"},
}};

/// Whether Python could decode the bytes as str: UTF-8, lone surrogates included, as its pickler writes them.
bool is_utf8(std::string_view bytes);
/// Bytes as the characters U+0000 to U+00FF.
std::string latin1_to_utf8(std::string_view bytes);
/// The reverse, of UTF-8; nothing for text with other characters.
std::optional<std::string> utf8_to_latin1(std::string_view text);
/// Whether each byte is 0 or 1, as memory of bools must be.
bool are_bools(std::string_view bytes);

}  // namespace lockstep::pickle

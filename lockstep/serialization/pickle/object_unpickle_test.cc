// Bytes that must not be read: hostile, malformed and mutated pickles. What is read as it was written:
// object_pickle_test.cc.
#include <cstring>
#include <gmock/gmock.h>
#include <map>
#include <random>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/pickle/format.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/testing/memory_bound.h>

namespace lockstep::object_unpickle_test {
namespace {

using c10::IValue;
using ::testing::HasSubstr;
using testing::MemoryBound;
using namespace std::string_literals;

/// The message of the error that reading `bytes` must give.
std::string read_error(std::string_view bytes) {
  try {
    const IValue value = unpickle_object(bytes, "the object of rank 3");
    ADD_FAILURE() << "it was read as a " << value.tagKind();
  } catch (const c10::DistBackendError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("the object of rank 3 can't be read: byte "));
    return error.what_without_backtrace();
  }
  return {};
}

std::string string_of(std::string_view text) {
  return "\x8c" + std::string(1, static_cast<char>(text.size())) + std::string(text);
}
std::string global(std::string_view module, std::string_view name) {
  return string_of(module) + string_of(name) + "\x93";
}

TEST(ObjectUnpickle, RunsNothing) {
  EXPECT_THAT(read_error("\x80\x04" + global("os", "system") + string_of("touch /tmp/x") + "\x85R."),
              HasSubstr("Python's os.system; objects consist of None"));
  EXPECT_THAT(read_error("cos\nsystem\n(S'ls'\ntR."), HasSubstr("Python's os.system"));
  EXPECT_THAT(read_error(global("builtins", "eval") + "."),
              HasSubstr("byte 16, opcode 0x93: Python's builtins.eval"));
  EXPECT_THAT(read_error(global("torch._utils", "_rebuild_tensor_v2") + ")R."),
              HasSubstr("a tensor of unknown form"));
  EXPECT_THAT(read_error(global("torch", "device") + "."), HasSubstr("a storage, function or type"));
  EXPECT_THAT(read_error(global("torch", "device") + string_of("gpu7") + "\x85R."),
              HasSubstr("the device 'gpu7'"));
  // To torch's C++ it is cuda:44.
  EXPECT_THAT(read_error(global("torch", "device") + string_of("cuda") + "M,\x01\x86R."),
              HasSubstr("the device 'cuda:300'"));
  EXPECT_THAT(read_error("]K\x01\x85R."s), HasSubstr("opcode 0x52 'R': a call of what is no function"));
  EXPECT_THAT(read_error("}]b."), HasSubstr("an object with attributes"));
}

TEST(ObjectUnpickle, RefusesWhatIsNoObject) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "the bytes end too early: 1 more wanted, 0 there"},
      {".", "unfinished object"},
      {"NN.", "unfinished object"},
      {"(.", "unfinished object"},
      {"N.N", "the pickle ends before its bytes do"},
      {"\x80\x06N.", "protocol 6; 2 to 5"},
      {"I1\n.", "opcode 0x49 'I': an opcode that protocols 2 to 5 have no use for"},
      {"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."s, "does not fit into 64 bits"},
      {"\x8f.", "a set"},
      {")\x81.", "an object of a Python class"},
      {"h\x00."s, "memo entry 0 does not exist"},
      {"Nq\x05.", "memo entry 5 is out of order"},
      {"X\xff\xff\xff\xffhello", "4294967295 more wanted, 5 there"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xffhello", "18446744073709551615 more wanted"},
      {"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "a frame that is longer"},
      {"\x8c\x01\xff.", "a str that is not UTF-8"},
      {"]\x94h\x00"
       "a."s,
       "a container that contains itself"},
      {"]\x94h\x00\x85"
       "a."s,
       "a container that contains itself"},
      {"]\x94}K\x01h\x00sh\x00N"
       "a."s,
       "changes after it was used"},
      {"NN"
       "a.",
       "elements for what is no list"},
      {"}(K\x01u.", "a key without a value"},
      {"}]Ns.", "keys other than strings, numbers and bools"},
      {"}(K\x01NK\x01Nu.", "a dict with a key twice"},
      {"K\x01Q.", "a persistent id"},
      {"(e.", "nothing on the stack"},
      {"e.", "no mark on the stack"},
      {"N(a.", "too little on the stack"},
  };
  for (const auto& [bytes, words] : cases) EXPECT_THAT(read_error(bytes), HasSubstr(words));
}

TEST(ObjectUnpickle, RefusesDepthWithoutOverflowingTheStack) {
  EXPECT_THAT(read_error(std::string(1000000, ']') + std::string(999999, 'a') + "."),
              HasSubstr("nested deeper than 200"));
  std::string tuples = ")";
  for (int i = 0; i < 1000000; ++i) tuples += '\x85';
  EXPECT_THAT(read_error(tuples + "."), HasSubstr("nested deeper than 200"));
  std::string counters = "}";  // a call's result keeps its depth, whichever way it comes
  for (int i = 0; i < 1000; ++i) counters = global("collections", "Counter") + "}K\x01" + counters + "s\x85R";
  EXPECT_THAT(read_error(counters + "."), HasSubstr("nested deeper than 200"));
}

TEST(ObjectUnpickle, RefusesKeysThatWouldFillTheMemory) {
  // Inverse of the hash's multiplier: key i lands on place i of 2^64, thus all on place 0 of any real table.
  constexpr uint64_t kInverse = 0xf1de83e19937733dull;
  static_assert(kInverse * 11400714819323198485ull == 1);
  std::string bytes = "}(";
  for (uint64_t i = 0; i < 64; ++i) {
    const uint64_t key = i * kInverse;
    bytes += "\x8a\x08"s + std::string(reinterpret_cast<const char*>(&key), 8) + "N";
  }
  MemoryBound bound(256 << 20);
  EXPECT_THAT(read_error(bytes + "u."), HasSubstr("keys collide"));
}

TEST(ObjectUnpickle, RefusesContainersThatWouldFillTheMemory) {
  MemoryBound bound(256 << 20);
  for (const char* container : {"}", "]", ")", "}\x88Ns"}) {
    std::string bytes = "](";
    while (bytes.size() < (2 << 20)) bytes += container;
    EXPECT_THAT(read_error(bytes + "e."), HasSubstr("lists, dicts and tuples that take too much memory"));
  }
}

TEST(ObjectUnpickle, ReadsManySmallDicts) {
  const std::vector<std::map<std::string, int64_t>> labels(100'000, {{"label", 3}});
  const IValue read = unpickle_object(pickle_object(to_object(labels)));
  ASSERT_EQ(read.toListRef().size(), labels.size());
  EXPECT_EQ((from_object<std::map<std::string, int64_t>>(read.toListRef().back())), labels.back());
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t place = text.find(from);
  EXPECT_NE(place, std::string::npos) << "the test no longer fits the format";
  return place == std::string::npos ? text : text.replace(place, from.size(), to);
}

TEST(ObjectUnpickle, RefusesTensorsThatDoNotFitIntoTheirStorage) {
  const std::string bytes = pickle_object(at::arange(6, at::kFloat).view({2, 3}));
  const std::string layout = "K\x00(K\x02K\x03t(K\x03K\x01t"s;  // offset, sizes, strides
  const std::string huge = "\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x40"s, negative = "J\xff\xff\xff\xff";
  for (const std::string& forgery :
       {"K\x01(K\x02K\x03t(K\x03K\x01t"s, "K\x00(K\x03K\x03t(K\x03K\x01t"s, "K\x00(K\x02K\x03t(K\x04K\x01t"s,
        "K\x00(K\x02K\x03t(K\x03t"s, "N(K\x02K\x03t(K\x03K\x01t"s, negative + "(K\x02t(K\x01t"s,
        huge + "(K\x00t(K\x01t"s, "K\x00("s + huge + "t(K\x01t", "K\x00("s + huge + "K\x04t(K\x00K\x00t"s,
        "K\x00("s + huge + "K\x00t(K\x01K\x01t"s, "K\x00(K\x04K\x04t("s + huge + "K\x00t"s, huge + "(t(t"}) {
    EXPECT_THAT(read_error(replaced(bytes, layout, forgery)),
                HasSubstr("does not fit into its storage of 6 elements"));
  }
  EXPECT_THAT(read_error(replaced(bytes, layout, "K\x00("s + negative + "t(K\x01t")),
              HasSubstr("a size or stride"));
  EXPECT_THAT(read_error(replaced(bytes, layout, "K\x00N(t"s)), HasSubstr("sizes or strides are no tuple"));
  const at::Tensor expanded = unpickle_object(replaced(bytes, layout, "K\x05(K\x09t(K\x00t"s)).toTensor();
  EXPECT_TRUE(at::equal(expanded, at::full({9}, 5.f)));  // as expand() makes them
  const at::Tensor empty = unpickle_object(replaced(bytes, layout, "K\x07(K\x00t(K\x01t"s)).toTensor();
  EXPECT_EQ(empty.numel(), 0);  // as slice() makes them of a tensor that is empty
  EXPECT_EQ(empty.storage_offset(), 7);
}

TEST(ObjectUnpickle, ReadsLazyViews) {
  // The dict of the metadata comes after that of the hooks.
  const auto with_metadata = [](const at::Tensor& tensor, const std::string& metadata) {
    const std::string bytes = pickle_object(tensor);
    const size_t hooks = bytes.find("OrderedDict");
    EXPECT_NE(hooks, std::string::npos) << "the test no longer fits the format";
    const size_t end = bytes.find(")R", hooks) + 2;
    return bytes.substr(0, end) + metadata + bytes.substr(end);
  };
  const auto entry = [](std::string_view name, std::string_view value) {
    return "}" + string_of(name) + std::string(value) + "s";
  };
  const at::Tensor complex = at::randn({2, 2}, at::kComplexFloat), real = at::randn({3});
  EXPECT_TRUE(
      at::equal(unpickle_object(with_metadata(complex, entry("conj", "\x88"))).toTensor(), complex.conj()));
  EXPECT_TRUE(at::equal(unpickle_object(with_metadata(complex, entry("neg", "\x88"))).toTensor(), -complex));
  EXPECT_TRUE(at::equal(unpickle_object(with_metadata(real, entry("neg", "\x88"))).toTensor(), -real));
  EXPECT_TRUE(at::equal(unpickle_object(with_metadata(real, entry("neg", "\x89"))).toTensor(), real));
  for (const std::string& forgery :
       {with_metadata(real, entry("conj", "\x88")), with_metadata(real > 0, entry("neg", "\x88")),
        with_metadata(real, entry("neg", "K\x01")), with_metadata(real, entry("zero", "\x88")),
        with_metadata(real, "K\x01")}) {
    EXPECT_THAT(read_error(forgery), HasSubstr("a tensor with unknown metadata"));
  }
}

TEST(ObjectUnpickle, RefusesForgedStorages) {
  const std::string bytes = pickle_object(at::arange(6, at::kFloat));
  const std::pair<std::pair<std::string, std::string>, std::string> cases[] = {
      {{"FloatStorage", "AloatStorage"}, "Python's torch.AloatStorage"},
      {{"FloatStorage", "ShortStorage"}, "ends before its bytes do"},
      {{"FloatStorage\nX", "float8_e5m2\n)R"}, "a call within a storage"},
      {{"cpu", "mps"}, "a tensor on mps; send it from the CPU"},
      {{"little_endian\x88", "little_endian\x89"}, "a big-endian machine"},
      {{"cpuK\x06N", "cpuK\x07N"}, "a storage with two sizes"},
      {{"cpuK\x06N", "cpuNNN"}, "a storage of unknown form"},
      {{"\x6c\xfc\x9c\x46", "\x6c\xfc\x9c\x47"}, "a storage that torch.save did not write"},
      {{"]X\x01\x00\x00\x00"
        "0"s,
        "]X\x01\x00\x00\x00"
        "1"s},
       "a storage without its key"},
      {{"_load_from_bytes", "_load_From_bytes"}, "Python's torch.storage._load_From_bytes"},
  };
  for (const auto& [forgery, words] : cases) {
    EXPECT_THAT(read_error(replaced(bytes, forgery.first, forgery.second)), HasSubstr(words));
  }
  EXPECT_THAT(
      read_error(replaced(pickle_object(at::ones(3, at::kBool)), "\x01\x01\x01\x85R", "\x01\x02\x01\x85R")),
      HasSubstr("a bool that is neither true nor false"));
}

TEST(ObjectUnpickle, ReadsEachStorageOnce) {
  const std::string bytes = pickle_object(at::zeros(1000));
  const size_t begin = bytes.find(pickle::kStorageMagic);
  uint32_t size = 0;
  std::memcpy(&size, bytes.data() + begin - 4, 4);
  const std::string storage = bytes.substr(begin - 5, size + 5);  // with its opcode
  const std::string load = global("torch.storage", "_load_from_bytes");
  EXPECT_THAT(read_error(load + "\x94" + storage + "\x94\x85Rh\x00h\x01\x85R."s),
              HasSubstr("occurs several times"));
}

IValue sample() {
  return to_object(std::map<std::string, IValue>{
      {"tensor", at::arange(6, at::kFloat).view({2, 3})},
      {"types", to_object(std::vector<IValue>{at::ones(2, at::kBool), at::ones(1, at::kInt).to(at::kUInt16),
                                              c10::Device("cpu")})},
      {"numbers", to_object(std::vector<IValue>{int64_t{1}, int64_t{1} << 40, 0.5, c10::complex<double>(1, 2),
                                                true, IValue()})},
      {"text", "grün"},
      {"bytes", "\xff\x00"s},
      {"tuple", c10::ivalue::Tuple::create({true, "x"})},
      {"dict", to_object(std::map<int64_t, std::string>{{1, "a"}, {2, "b"}})},
  });
}

/// Reading either works or says what is wrong; anything else fails the test or ends the program.
bool survives(std::string_view bytes) {
  try {
    unpickle_object(bytes);
    return true;
  } catch (const c10::DistBackendError&) {
    return false;
  }
}

TEST(ObjectUnpickle, RefusesEveryTruncation) {
  const std::string bytes = pickle_object(sample());
  ASSERT_TRUE(survives(bytes));
  MemoryBound bound(256 << 20);
  for (size_t size = 0; size < bytes.size(); ++size) {
    // A copy of its own, so that AddressSanitizer sees a byte too many.
    EXPECT_FALSE(survives(std::string(bytes.data(), size))) << size << " of " << bytes.size();
  }
}

TEST(ObjectUnpickle, SurvivesMutations) {
  const std::string bytes = pickle_object(sample());
  std::mt19937_64 random(3);
  MemoryBound bound(256 << 20);
  int readable = 0, rounds = 0;
  for (size_t place = 0; place < bytes.size(); ++place) {
    for (const int mask : {1, 2, 4, 8, 16, 32, 64, 128, static_cast<int>(random() % 255 + 1)}) {
      std::string mutant = bytes;
      mutant[place] = static_cast<char>(mutant[place] ^ mask);
      readable += survives(mutant), ++rounds;
    }
  }
  EXPECT_GT(readable, rounds / 100) << "few changes of a letter or number leave something readable";
  EXPECT_LT(readable, rounds) << "nothing was refused";
}

TEST(ObjectUnpickle, SurvivesRandomBytes) {
  const std::string bytes = pickle_object(sample());
  constexpr std::string_view kOpcodes =
      "(.GJKMNRXabcehjqrstu)]}BC\x80\x85\x86\x87\x88\x89\x8a\x8c\x93\x94\x95";
  std::mt19937_64 random(5);
  MemoryBound bound(256 << 20);
  for (int round = 0; round < 20000; ++round) {
    std::string text(random() % 60, '\0');
    for (char& c : text)
      c = static_cast<char>(random() % 4 ? kOpcodes[random() % kOpcodes.size()] : random());
    survives(text);
    std::string spliced = bytes;  // a piece of a pickle over another place
    const size_t from = random() % bytes.size(), to = random() % bytes.size(), size = random() % 40;
    spliced.replace(to, random() % 40, bytes.substr(from, size));
    survives(spliced);
  }
}

}  // namespace
}  // namespace lockstep::object_unpickle_test

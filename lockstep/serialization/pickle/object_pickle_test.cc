// Objects to bytes and back, and what can't be written. Bytes that must not be read: object_unpickle_test.cc.
// Python's side: objects_parity_test.py.
#include <gmock/gmock.h>
#include <limits>
#include <random>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/pickle/format.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::object_pickle_test {
namespace {

using c10::IValue;
using ::testing::HasSubstr;
using namespace std::string_literals;

IValue round_trip(const IValue& value) {
  return unpickle_object(pickle_object(value));
}

bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto plain = [](const at::Tensor& t) { return t.detach().resolve_conj().resolve_neg().contiguous(); };
  const at::Tensor left = plain(a), right = plain(b);
  return a.numel() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

/// Equal in kind, structure and bits; lists and dicts may differ in the types they declare.
bool same(const IValue& a, const IValue& b) {
  if (a.isTensor()) return b.isTensor() && same_tensor(a.toTensor(), b.toTensor());
  if (a.isDouble())
    return b.isDouble() && std::bit_cast<int64_t>(a.toDouble()) == std::bit_cast<int64_t>(b.toDouble());
  if (a.isList() || a.isTuple()) {
    if (a.isList() != b.isList() || a.isTuple() != b.isTuple()) return false;
    const auto left = a.isList() ? a.toListRef().vec() : std::vector<IValue>(a.toTupleRef().elements());
    const auto right = b.isList() ? b.toListRef().vec() : std::vector<IValue>(b.toTupleRef().elements());
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), same);
  }
  if (a.isGenericDict()) {
    if (!b.isGenericDict() || a.toGenericDict().size() != b.toGenericDict().size()) return false;
    auto right = b.toGenericDict().begin();  // order counts
    for (const auto& item : a.toGenericDict()) {
      if (!same(item.key(), right->key()) || !same(item.value(), right->value())) return false;
      ++right;
    }
    return true;
  }
  return a.tagKind() == b.tagKind() && a == b;
}

IValue list_of(std::vector<IValue> elements) {
  return to_object(elements);
}
IValue nested(const IValue& core, int levels) {
  return levels == 0 ? core : list_of({nested(core, levels - 1)});
}

std::string write_error(const IValue& value, size_t max_bytes = max_object_bytes()) {
  return testing::message_of<c10::ValueError>([&] { pickle_object(value, max_bytes); });
}

// ---- What comes back as it was ----

TEST(ObjectPickle, KeepsScalars) {
  constexpr auto kLowest = std::numeric_limits<int64_t>::min(),
                 kHighest = std::numeric_limits<int64_t>::max();
  for (const int64_t value :
       {int64_t{0}, int64_t{-1}, int64_t{255}, int64_t{256}, int64_t{65535}, int64_t{65536}, int64_t{-128},
        int64_t{1} << 31, -(int64_t{1} << 31), kLowest, kHighest}) {
    EXPECT_TRUE(same(round_trip(value), value)) << value;
  }
  for (const double value : {0.0, -0.0, 0.1, -1e300, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_TRUE(same(round_trip(value), value)) << value;
  }
  EXPECT_TRUE(round_trip(IValue()).isNone());
  EXPECT_TRUE(same(round_trip(true), true) && same(round_trip(false), false));
  EXPECT_TRUE(same(round_trip(c10::complex<double>(1, -2)), c10::complex<double>(1, -2)));
  EXPECT_TRUE(same(round_trip(c10::Device("cuda:3")), c10::Device("cuda:3")));
}

TEST(ObjectPickle, KeepsStrings) {
  for (const std::string& text :
       {""s, "plain"s, "grün € 😀"s, "a\0b"s, std::string(255, 'x'), std::string(256, 'x'),
        std::string(70000, 'y'), "\xff\xfe not UTF-8"s, "\xc0\x80"s, std::string(300, '\x80')}) {
    EXPECT_TRUE(same(round_trip(text), text)) << text.substr(0, 20);
  }
}

TEST(ObjectPickle, KnowsUtf8) {
  for (const char* good : {"", "a", "ü", "€", "😀", "\xed\xa0\x80" /* a surrogate */, "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(pickle::is_utf8(good)) << good;
  }
  for (const char* bad : {"\x80", "\xc3", "\xc1\xbf", "\xe0\x9f\xbf", "\xe2\x82", "\xf0\x8f\xbf\xbf",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "a\xc3(", "\xf0\x9f\x98"}) {
    EXPECT_FALSE(pickle::is_utf8(bad)) << bad;
  }
}

TEST(ObjectPickle, KeepsContainers) {
  const auto typed = std::vector<IValue>{
      IValue(std::vector<int64_t>{1, 2}),        IValue(std::vector<double>{0.5}),
      IValue(std::vector<std::string>{"a", ""}), IValue(std::vector<at::Tensor>{at::ones(2)}),
      IValue(std::vector<bool>{true, false}),    IValue(std::vector<int64_t>{})};
  for (const IValue& value : typed) EXPECT_TRUE(same(round_trip(value), value)) << value;
  EXPECT_TRUE(same(round_trip(list_of(typed)), list_of(typed)));
  const auto tuple =
      c10::ivalue::Tuple::create({int64_t{1}, "two", c10::ivalue::Tuple::create(std::vector<IValue>{})});
  EXPECT_TRUE(same(round_trip(tuple), tuple));
  const IValue dict =
      to_object(std::map<std::string, IValue>{{"loss", 0.01}, {"tuple", tuple}, {"", IValue()}});
  EXPECT_TRUE(same(round_trip(dict), dict));
  EXPECT_TRUE(same(round_trip(to_object(std::map<int64_t, bool>{{-1, true}, {7, false}})),
                   to_object(std::map<int64_t, bool>{{-1, true}, {7, false}})));
  EXPECT_TRUE(same(round_trip(nested(1, kMaxObjectDepth)), nested(1, kMaxObjectDepth)));
  std::vector<int64_t> many(100000);
  std::iota(many.begin(), many.end(), 0);
  EXPECT_TRUE(same(round_trip(IValue(many)), IValue(many)));
}

TEST(ObjectPickle, KeepsOrderAndLargeDicts) {
  std::mt19937_64 random(7);
  c10::Dict<std::string, int64_t> words;
  c10::Dict<int64_t, int64_t> numbers, strided;
  for (int64_t i = 0; i < 20000; ++i) {
    words.insert("key " + std::to_string(random()), i);
    numbers.insert(static_cast<int64_t>(random()), i);
    strided.insert(i << 40, i);
  }
  for (const IValue& dict : {IValue(words), IValue(numbers), IValue(strided)})
    EXPECT_TRUE(same(round_trip(dict), dict));
}

TEST(ObjectPickle, WritesWhatStandsInSeveralPlacesOnce) {
  IValue shared = list_of({int64_t{1}});
  const at::Tensor tensor = at::zeros(1000);
  IValue value = list_of({shared, shared, tensor, tensor});
  EXPECT_LT(pickle_object(value).size(), 6000u);
  const auto read = round_trip(value).toListRef().vec();
  EXPECT_TRUE(read[0].is(read[1]) && read[2].is(read[3]));
  // A chain of doublings, 2^100 elements if it were unfolded.
  for (int i = 0; i < 100; ++i) shared = list_of({shared, shared});
  EXPECT_EQ(pickle_object(round_trip(shared)), pickle_object(shared));
}

TEST(ObjectPickle, KeepsTensorsOfAllTypes) {
  for (const auto& types :
       {std::vector<pickle::NamedType>(pickle::kStorageTypes.begin(), pickle::kStorageTypes.end()),
        std::vector<pickle::NamedType>(pickle::kNewTypes.begin(), pickle::kNewTypes.end())}) {
    for (const auto& [type, name] : types) {
      const bool is_pair = type == at::ScalarType::Float4_e2m1fn_x2;  // torch can't convert to these
      const at::Tensor tensor =
          is_pair ? at::randint(256, {3, 5}, at::kByte).view(type) : at::randint(2, {3, 5}).to(type);
      const at::Tensor read = round_trip(tensor).toTensor();
      EXPECT_TRUE(same_tensor(read, tensor)) << name;
      EXPECT_EQ(read.strides(), tensor.strides()) << name;
    }
  }
}

TEST(ObjectPickle, KeepsTensorsOfAllLayouts) {
  const at::Tensor base = at::randn({4, 6, 2, 3});
  for (const at::Tensor& tensor :
       {base.transpose(0, 2), base.slice(1, 1, 5, 2), base[2], at::randn({}), at::empty({0}),
        at::empty({3, 0, 2}), at::ones(1).expand({3, 4}), base.contiguous(at::MemoryFormat::ChannelsLast),
        at::randn({2, 2}, at::kComplexFloat).conj(), at::imag(at::randn({2, 2}, at::kComplexFloat).conj()),
        at::randn(3).requires_grad_(), base[0][0].to(at::kBFloat16).t().slice(0, 1)}) {
    const at::Tensor read = round_trip(tensor).toTensor();
    EXPECT_TRUE(same_tensor(read, tensor)) << tensor.sizes() << tensor.strides();
    EXPECT_FALSE(read.requires_grad());
    EXPECT_FALSE(read.is_alias_of(tensor));
  }
  EXPECT_TRUE(round_trip(base.contiguous(at::MemoryFormat::ChannelsLast))
                  .toTensor()
                  .is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(ObjectPickle, DoesNotCarryTheRestOfAViewsStorage) {
  EXPECT_LT(pickle_object(at::zeros(1 << 20)[7]).size(), 1000u);
}

// ---- Properties ----

class RandomObjects {
 public:
  explicit RandomObjects(uint64_t seed) : random_(seed) {}

  IValue make_many() { return list_of({make(5), make(5), make(5), make(5)}); }

 private:
  IValue make(int depth) {
    switch (pick(depth > 0 ? 12 : 8)) {
      case 0:
        return {};
      case 1:
        return pick(2) == 1;
      case 2:
        return static_cast<int64_t>(random_() >> pick(64)) * (pick(2) ? 1 : -1);
      case 3:
        return std::bit_cast<double>(random_());
      case 4:
      case 5:
        return string();
      case 6:
        return tensor();
      case 7:
        return c10::complex<double>(pick(9), pick(9));
      case 8:
      case 9:
        return list_of(elements(depth));
      case 10:
        return c10::ivalue::Tuple::create(elements(depth));
      default:
        return dict(depth);
    }
  }

  size_t pick(size_t below) { return random_() % below; }

  std::string string() {
    std::string text(pick(4) == 0 ? pick(400) : pick(6), '\0');
    for (char& c : text) c = static_cast<char>(pick(3) == 0 ? pick(256) : 'a' + pick(26));
    return text;
  }

  std::vector<IValue> elements(int depth) {
    std::vector<IValue> values;
    for (size_t i = pick(5); i > 0; --i) values.push_back(make(depth - 1));
    return values;
  }

  IValue dict(int depth) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (size_t i = pick(5); i > 0; --i) {
      dict.insert(pick(2) ? IValue(string()) : IValue(static_cast<int64_t>(pick(1000))), make(depth - 1));
    }
    return dict;
  }

  at::Tensor tensor() {
    std::vector<int64_t> sizes;
    for (size_t i = pick(4); i > 0; --i) sizes.push_back(static_cast<int64_t>(pick(5)));
    const auto& table = pickle::kStorageTypes;
    at::Tensor tensor = at::randint(2, sizes).to(table[pick(table.size())].type);
    if (tensor.dim() > 1 && pick(2)) tensor = tensor.transpose(0, 1);
    if (tensor.dim() > 0 && tensor.size(0) > 1 && pick(2)) tensor = tensor.slice(0, 1);
    return tensor;
  }

  std::mt19937_64 random_;
};

TEST(ObjectPickle, KeepsRandomObjects) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const IValue value = RandomObjects(seed).make_many();
    const std::string bytes = pickle_object(value);
    const IValue read = unpickle_object(bytes);
    ASSERT_TRUE(same(value, read)) << "seed " << seed << ": " << value;
    ASSERT_EQ(pickle_object(unpickle_object(pickle_object(read))), pickle_object(read)) << "seed " << seed;
  }
}

// ---- What can't be written ----

TEST(ObjectPickle, SaysWhereTheValueStandsThatCantBeWritten) {
  const IValue stream = IValue(at::make_generator<at::CPUGeneratorImpl>());
  EXPECT_THAT(write_error(stream), HasSubstr("can't pickle the object: it is of type Generator"));
  const IValue value = to_object(std::map<std::string, IValue>{{"a", list_of({int64_t{1}, stream})}});
  EXPECT_THAT(write_error(value),
              HasSubstr("its element [\"a\"][1] is of type Generator; objects consist of"));
  EXPECT_THAT(write_error(at::Tensor()), HasSubstr("undefined tensor; send None"));
  EXPECT_THAT(write_error(at::ones({2, 2}).to_sparse()), HasSubstr("make it dense"));
  EXPECT_THAT(write_error(at::empty(2, at::kMeta)), HasSubstr("a tensor on meta; move it with .cpu()"));
  EXPECT_THAT(write_error(at::quantize_per_tensor(at::ones(2), 1, 0, at::kQInt8)), HasSubstr("QInt8"));
  c10::Dict<at::Tensor, int64_t> tensors;
  tensors.insert(at::ones(1), 1);
  EXPECT_THAT(write_error(tensors), HasSubstr("has a key of type Tensor"));
}

TEST(ObjectPickle, RefusesWhatIsTooDeep) {
  EXPECT_THAT(write_error(nested(1, kMaxObjectDepth + 1)),
              HasSubstr("[0][0][0][0] leads deeper than 200 levels"));
  c10::impl::GenericList itself(c10::AnyType::get());
  itself.push_back(itself);
  EXPECT_THAT(write_error(itself), HasSubstr("its element [0] is a container that contains itself"));
  itself.clear();  // or it would never be freed
}

TEST(ObjectPickle, RefusesWhatIsTooLarge) {
  const std::string text(1000, 'x');
  EXPECT_EQ(pickle_object(text, 1008).size(), 1008u);
  EXPECT_THAT(write_error(text, 1007),
              HasSubstr("(1007 bytes); send less or raise LOCKSTEP_MAX_OBJECT_BYTES"));
  EXPECT_THAT(write_error(at::ones(1).expand({int64_t{1} << 40})), HasSubstr("LOCKSTEP_MAX_OBJECT_BYTES"));
}

// ---- What Python writes: pickle.dumps(…, protocol) ----

TEST(ObjectPickle, ReadsAllBinaryProtocols) {
  // {"k": [1, -2, 2.5, None, (True, 300)]}
  const std::string two =
      "\x80\x02}q\x00X\x01\x00\x00\x00kq\x01]q\x02(K\x01J\xfe\xff\xff\xffG@"
      "\x04\x00\x00\x00\x00\x00\x00N\x88M,\x01\x86q\x03"
      "es."s;
  const std::string five =
      "\x80\x05\x95\x23\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01k\x94]\x94(K\x01J\xfe\xff\xff\xffG@"
      "\x04\x00\x00\x00\x00\x00\x00N\x88M,\x01\x86\x94"
      "es."s;
  const IValue expected = to_object(std::map<std::string, IValue>{
      {"k",
       list_of({int64_t{1}, int64_t{-2}, 2.5, IValue(), c10::ivalue::Tuple::create({true, int64_t{300}})})}});
  EXPECT_TRUE(same(unpickle_object(two), expected));
  EXPECT_TRUE(same(unpickle_object(five), expected));
}

}  // namespace
}  // namespace lockstep::object_pickle_test

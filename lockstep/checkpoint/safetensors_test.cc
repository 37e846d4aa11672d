#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::safetensors_test {
namespace {

using testing::message_of;
using testing::Scratch;

class Safetensors : public ::testing::Test {
 protected:
  /// A file of this header and so many bytes of data.
  std::filesystem::path file_of(const std::string& header, size_t data_bytes) {
    const auto length = static_cast<uint64_t>(header.size());
    return file_of_bytes(std::string(reinterpret_cast<const char*>(&length), 8) + header +
                         std::string(data_bytes, 'x'));
  }
  std::filesystem::path file_of_bytes(const std::string& bytes) {
    const auto path = scratch_.path() / "hostile.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  /// What SafeOpen and load_file both say about it.
  std::string refusal(const std::filesystem::path& path) {
    const auto text = message_of<CheckpointError>([&] { safetensors::SafeOpen file(path); });
    EXPECT_EQ(text, message_of<CheckpointError>([&] { safetensors::load_file(path); }));
    EXPECT_NE(text.find(path.string()), std::string::npos) << text;
    return text;
  }
  std::string refusal(const std::string& header, size_t data_bytes) {
    return refusal(file_of(header, data_bytes));
  }

  Scratch scratch_;
};

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, uint64_t begin,
                  uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(Safetensors, EveryBoolIsZeroOrOneInMemory) {
  const auto path = file_of("{" + entry("flags", "BOOL", "[3]", 0, 3) + "}", 3);  // each byte is an 'x'
  for (const at::Tensor& flags :
       {safetensors::load_file(path).at("flags"), safetensors::SafeOpen(path).get_tensor("flags")}) {
    EXPECT_EQ(std::string(static_cast<const char*>(flags.const_data_ptr()), 3), "\1\1\1");
  }
}

TEST_F(Safetensors, ComesBack) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kUInt16, at::kUInt32,
        at::kUInt64, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kFloat8_e5m2,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz}) {
    const std::string name = c10::toString(dtype);
    tensors[name] = torch::randint(0, 2, {3, 5}).to(dtype);
    tensors[name + ".scalar"] = torch::randint(0, 2, {}).to(dtype);
    tensors[name + ".empty"] = torch::empty({2, 0, 3}).to(dtype);
  }
  const auto base = torch::rand({4, 6});
  tensors["transposed"] = base.t();
  tensors["part"] = base.slice(1, 1, 5, 2);
  tensors["shared"] = base;
  tensors["expanded"] = torch::rand({1, 3}).expand({5, 3});
  tensors["conjugate"] = torch::rand({3}, at::kComplexFloat).conj();
  tensors["gradient"] = torch::rand({3}, at::TensorOptions().requires_grad(true));
  const auto path = scratch_.path() / "all.safetensors";
  safetensors::save_file(tensors, path, {{"format", "pt"}, {"ünï", "\"\\\n"}});

  const safetensors::SafeOpen file(path);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"ünï", "\"\\\n"}}));
  const auto loaded = safetensors::load_file(path);
  EXPECT_EQ(file.keys().size(), tensors.size());
  EXPECT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto want = tensor.detach().resolve_conj().contiguous();
    for (const at::Tensor& got : {loaded.at(name), file.get_tensor(name)}) {
      ASSERT_EQ(got.scalar_type(), want.scalar_type()) << name;
      ASSERT_EQ(got.sizes(), want.sizes()) << name;
      EXPECT_TRUE(want.numel() == 0 ||
                  std::memcmp(got.const_data_ptr(), want.const_data_ptr(), want.nbytes()) == 0)
          << name;
      EXPECT_FALSE(got.requires_grad());
    }
  }
}

TEST_F(Safetensors, ReplacesAFileAsAWhole) {
  const auto path = scratch_.path() / "a.safetensors";
  safetensors::save_file({{"a", torch::ones({2})}}, path);
  EXPECT_THROW(safetensors::save_file({{"a", torch::ones({2}).to_sparse()}}, path), c10::ValueError);
  EXPECT_TRUE(torch::equal(safetensors::load_file(path).at("a"), torch::ones({2})));
  safetensors::save_file({{"b", torch::zeros({2})}}, path);
  EXPECT_EQ(safetensors::SafeOpen(path).keys(), std::vector<std::string>{"b"});
  EXPECT_EQ(scratch_.entries(), std::vector<std::string>{"a.safetensors"});
  const auto text = message_of<CheckpointError>([&] {
    safetensors::save_file({{"a", torch::ones({2})}}, scratch_.path() / "none" / "a.safetensors");
  });
  EXPECT_SAYS(text, "No such file or directory");
}

TEST_F(Safetensors, SaysWhatItCannotWrite) {
  const auto path = scratch_.path() / "a.safetensors";
  const auto refused = [&](const std::string& name, const at::Tensor& tensor) {
    return message_of<c10::ValueError>([&] { safetensors::save_file({{name, tensor}}, path); });
  };
  EXPECT_SAYS(refused("a", torch::rand({2}, at::kComplexDouble)), "ComplexDouble");
  EXPECT_SAYS(refused("a", torch::ones({2}).to_sparse()), "to_dense()");
  EXPECT_SAYS(refused("__metadata__", torch::ones({2})), "__metadata__");
  EXPECT_SAYS(refused("\xff", torch::ones({2})), "UTF-8");
  EXPECT_SAYS(refused("a", at::Tensor()), "undefined");
  EXPECT_SAYS(refused("a", torch::ones({2}, at::kMeta)), "meta");
  EXPECT_TRUE(scratch_.entries().empty());
  const safetensors::SafeOpen file(file_of("{}", 0));
  EXPECT_SAYS(message_of<c10::ValueError>([&] { file.get_tensor("b"); }), "no tensor 'b'");
}

TEST_F(Safetensors, RefusesHostileHeaders) {
  EXPECT_SAYS(refusal(file_of_bytes("")), "truncated");
  EXPECT_SAYS(refusal(file_of_bytes("1234567")), "truncated");
  EXPECT_SAYS(refusal(file_of_bytes(std::string(8, '\xff'))), "more than the 100000000");
  EXPECT_SAYS(refusal(file_of_bytes(std::string("\x00\xe1\xf5\x05\x00\x00\x00\x00", 8))), "truncated");
  EXPECT_SAYS(refusal(file_of_bytes(std::string(8, '\0'))), "does not begin with '{'");
  EXPECT_SAYS(refusal(" {}", 0), "does not begin with '{'");
  EXPECT_SAYS(refusal("{", 0), "no JSON");
  EXPECT_SAYS(refusal("{} {}", 0), "no JSON");
  EXPECT_SAYS(refusal(std::string("{\"\xff\":1}"), 0), "no JSON");
  EXPECT_SAYS(refusal("{\"a\":" + std::string(1'000'000, '['), 0), "has a list");
  EXPECT_SAYS(refusal("{\"a\":" + std::string(1'000'000, '{'), 0), "no JSON");

  const std::string a = entry("a", "U8", "[1]", 0, 1);
  EXPECT_SAYS(refusal("{" + a + "," + a + "}", 1), "'a' is there twice");
  EXPECT_SAYS(refusal("{" + a + "," + entry("b", "U8", "[1]", 0, 1) + "}", 1), "within tensor 'a'");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[3]", 0, 3) + "," + entry("b", "U8", "[1]", 1, 2) + "}", 3),
              "within tensor 'a'");
  EXPECT_SAYS(refusal("{" + a + "," + entry("b", "U8", "[1]", 2, 3) + "}", 3), "belong to no tensor");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[1]", 1, 2) + "}", 2), "belong to no tensor");
  EXPECT_SAYS(refusal("{" + a + "}", 2), "of which the tensors take 1");
  EXPECT_SAYS(refusal("{" + a + "}", 0), "of which the file has 0");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[1]", 1, 0) + "}", 1), "before its begin");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[2]", 0, 1) + "}", 1), "needs 2 bytes");
  EXPECT_SAYS(refusal("{" + entry("a", "F32", "[1]", 0, 1) + "}", 1), "needs 4 bytes");
  EXPECT_SAYS(refusal("{" + entry("a", "X9", "[1]", 0, 1) + "}", 1), "unknown dtype 'X9'");
  EXPECT_SAYS(refusal("{" + entry("a", "F6_E2M3", "[1]", 0, 1) + "}", 1), "torch does not have");
  EXPECT_SAYS(refusal("{" + entry("a", "F4", "[3]", 0, 1) + "}", 1), "not even");
  EXPECT_SAYS(refusal("{" + entry("a", "F4", "[]", 0, 1) + "}", 1), "not even");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[9223372036854775807,2]", 0, 1) + "}", 1), "overflows");
  EXPECT_SAYS(refusal("{" + entry("a", "F64", "[9223372036854775807]", 0, 1) + "}", 1), "overflows");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[0,9223372036854775807,3]", 0, 0) + "}", 0), "overflows");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[18446744073709551615]", 0, 1) + "}", 1), "63 bits");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[-1]", 0, 1) + "}", 1), "negative");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[1.0]", 0, 1) + "}", 1), "not whole");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "[[1]]", 0, 1) + "}", 1), "has a list");
  EXPECT_SAYS(refusal("{" + entry("a", "U8", "\"1\"", 0, 1) + "}", 1), "has a string");
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_SAYS(refusal("{" + entry("a", "U8", ones + "]", 0, 1) + "}", 1), "more than 64 dimensions");
  EXPECT_SAYS(refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1), "1 offsets");
  EXPECT_SAYS(refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1),
              "more than 2 offsets");
  EXPECT_SAYS(refusal(R"({"a":{"dtype":"U8","shape":[1]}})", 1), "no 'data_offsets'");
  EXPECT_SAYS(refusal(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1), "no 'dtype'");
  EXPECT_SAYS(refusal(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1), "twice");
  EXPECT_SAYS(refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}})", 1),
              "unknown field");
  EXPECT_SAYS(refusal(R"({"a":1})", 0), "has a number");
  EXPECT_SAYS(refusal(R"({"a":null})", 0), "has null");
  EXPECT_SAYS(refusal("[]", 0), "does not begin");
  EXPECT_SAYS(refusal(R"({"__metadata__":{"a":1}})", 0), "has a number");
  EXPECT_SAYS(refusal(R"({"__metadata__":{"a":"1","a":"2"}})", 0), "twice");
  EXPECT_SAYS(refusal(R"({"__metadata__":{"a":{}}})", 0), "an object");
  EXPECT_SAYS(refusal("{\"" + std::string(10'000, 'n') + "\":1}", 0), "…");
  // What stands in the file may go to a terminal.
  EXPECT_EQ(refusal(R"({"a\u001b[2J":1})", 0).find('\x1b'), std::string::npos);

  std::filesystem::create_directory(scratch_.path() / "directory");
  EXPECT_SAYS(refusal(scratch_.path() / "directory"), "no regular file");
  EXPECT_SAYS(refusal(scratch_.path() / "none"), "No such file");
}

TEST_F(Safetensors, TakesWhatTheFormatAllows) {
  const auto open = [&](const std::string& header, size_t bytes) {
    return safetensors::load_file(file_of(header, bytes));
  };
  EXPECT_TRUE(open("{}", 0).empty());
  EXPECT_TRUE(open("{}   \n ", 0).empty());
  EXPECT_TRUE(open(R"({"__metadata__":null})", 0).empty());
  EXPECT_EQ(open("{" + entry("a", "U16", "[1]", 1, 3) + "," + entry("b", "U8", "[]", 0, 1) + "}", 3)
                .at("a")
                .numel(),
            1);
  EXPECT_EQ(open("{" + entry("a", "F4", "[2,6]", 0, 6) + "}", 6).at("a").sizes(),
            (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(open("{" + entry("z", "F32", "[0]", 1, 1) + "," + entry("a", "U8", "[1]", 0, 1) + "}", 1).size(),
            2U);
}

}  // namespace
}  // namespace lockstep::safetensors_test

// The C++ side of objects_parity_test.py.
//
//     objects_driver echo IN OUT      reads each pickle of IN and writes it again
//     objects_driver samples OUT      writes one pickle: {name: object made in C++}
//
// IN: records of 8 bytes length and a pickle. OUT: records of a letter ('=' pickle, '!' error message), 8
// bytes length and the content.
#include <fstream>
#include <iostream>
#include <iterator>

#include <torch/torch.h>

#include <lockstep/serialization/object_conversion.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/testing/driver.h>

namespace objects_driver {
namespace {

using c10::IValue;
using lockstep::to_object;

void write_record(std::ostream& out, char kind, const std::string& content) {
  const auto size = static_cast<uint64_t>(content.size());
  out.put(kind).write(reinterpret_cast<const char*>(&size), sizeof(size));
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
}

void echo(std::istream& in, std::ostream& out) {
  uint64_t size = 0;
  while (in.read(reinterpret_cast<char*>(&size), sizeof(size))) {
    std::string bytes(size, '\0');
    in.read(bytes.data(), static_cast<std::streamsize>(size));
    try {
      write_record(out, '=', lockstep::pickle_object(lockstep::unpickle_object(bytes, "the pickle")));
    } catch (const c10::Error& error) {
      write_record(out, '!', error.what_without_backtrace());
    }
  }
}

IValue samples() {
  const auto matrix = torch::arange(12, at::kFloat).view({3, 4});
  const auto shared = to_object(std::vector<int>{1, 2});
  return to_object(std::map<std::string, IValue>{
      {"none", IValue()},
      {"bools", to_object(std::vector<bool>{true, false})},
      {"integers", IValue(std::vector<int64_t>{0, -1, 255, 256, 65536, INT64_MAX, INT64_MIN})},
      {"doubles", IValue(std::vector<double>{0.1, -0.0, 1e300, INFINITY})},
      {"complex", c10::complex<double>(1, -2)},
      {"device", c10::Device("cuda:1")},
      {"string", "grün 😀"},
      {"long string", std::string(70000, 'x')},
      {"bytes", std::string("\xff\x00\x01", 3)},
      {"strings", IValue(std::vector<std::string>{"a", ""})},
      {"empty", to_object(std::tuple<std::vector<int>, std::map<int, int>, std::tuple<>>())},
      {"dict", IValue(c10::Dict<int64_t, double>())},
      {"map", to_object(std::map<int, std::map<std::string, std::vector<double>>>{{-1, {{"a", {0.5}}}}})},
      {"tuple", to_object(std::tuple<int, std::string, std::pair<bool, float>>(1, "b", {true, 0.25F}))},
      {"shared", to_object(std::vector<IValue>{shared, shared})},
      {"transposed", matrix.t()},
      {"strided", matrix.slice(1, 0, 4, 2)},
      {"channels last", torch::arange(16).view({1, 2, 2, 4}).contiguous(at::MemoryFormat::ChannelsLast)},
      {"expanded", torch::ones(1).expand({2, 3})},
      {"zero-size", torch::empty({3, 0, 2})},
      {"scalar", torch::tensor(2.5, at::kDouble)},
      {"bfloat16", matrix.to(at::kBFloat16)},
      {"float8", matrix.to(at::kFloat8_e4m3fn)},
      {"uint16", matrix.to(at::kUInt16)},
      {"requires grad", torch::ones(2, torch::requires_grad())},
      {"conjugated", torch::complex(matrix, matrix).conj()},
      {"tensors",
       to_object(std::map<std::string, std::vector<at::Tensor>>{{"a", {torch::ones(2, at::kBool), matrix}}})},
  });
}

}  // namespace

LOCKSTEP_DRIVER(objects_driver) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "echo" && argc == 4) {
    std::ifstream in(argv[2], std::ios::binary);
    std::ofstream out(argv[3], std::ios::binary);
    echo(in, out);
  } else if (command == "samples" && argc == 3) {
    std::ofstream out(argv[2], std::ios::binary);
    write_record(out, '=', lockstep::pickle_object(samples()));
  } else {
    std::cerr << "usage: objects_driver echo IN OUT | samples OUT\n";
    return 2;
  }
  return 0;
}

}  // namespace objects_driver

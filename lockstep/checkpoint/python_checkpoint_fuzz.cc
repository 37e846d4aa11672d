// Fuzzes the reader of torch.save's files: any bytes are an object or a CheckpointError. The first byte of an
// input says whether the rest is a file, or the data.pkl of one with two storages; checksums keep changes of
// a file from the unpickler.
#include <cstddef>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/arange.h>
#include <caffe2/serialize/inline_container.h>

#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::python_checkpoint_fuzz {
namespace {

constexpr size_t kStorageBytes = 96;

std::string file_around(std::string_view pickle) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  const std::string storage(kStorageBytes, '\1');
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("byteorder", "little", 6);
  archive.writeRecord("data/0", storage.data(), storage.size());
  archive.writeRecord("data/1", storage.data(), storage.size());
  archive.writeEndOfFile();
  return bytes;
}

// What Python writes lies in tests/corpus/python_checkpoint.
std::vector<std::string> seeds() {
  // torch.save({"a": torch.zeros(2, 3), 1: (0.5, None)})'s, with storages that are there.
  using namespace std::string_literals;
  const std::string pickle =
      "\x80\x02}q\0(X\1\0\0\0aq\1ctorch._utils\n_rebuild_tensor_v2\nq\2("
      "(X\7\0\0\0storageq\3ctorch\nFloatStorage\nq\4X\1\0\0\0"
      "0q\5X\3\0\0\0cpuq\6K\x18tq\7QK\0K\2K\3\x86q\x08"
      "K\3K\1\x86q\x09\x89"
      "ccollections\nOrderedDict\nq\x0a)Rq\x0btq\x0cRq\x0dK\1G?\xe0\0\0\0\0\0\0N\x86q\x0eu."s;
  return {std::string("\1") + pickle, std::string(1, '\0') + file_around(pickle)};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(python_checkpoint, seeds) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string bytes = data[0] % 2 == 0 ? std::string(rest) : file_around(rest);
  c10::IValue object;
  try {
    object = parse_python_object(bytes);
  } catch (const CheckpointError&) {
    return 0;
  }
  try {
    if (pickle_object(object, size_t{1} << 16).empty()) std::abort();
  } catch (const c10::ValueError&) {  // too large
  }
  return 0;
}

}  // namespace lockstep::python_checkpoint_fuzz

// Fuzzes the reader of object pickles: any bytes are an object or a DistBackendError, and an object that was
// read can be written (unless it grew too large: expanded tensors unfold) and read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <lockstep/serialization/pickle/object_pickle.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::object_pickle_fuzz {
namespace {

// What Python writes lies in tests/corpus/object_pickle.
std::vector<std::string> seeds() {
  c10::Dict<std::string, at::Tensor> tensors;
  tensors.insert("weight", at::arange(6, at::kFloat).view({2, 3}).t());
  tensors.insert("steps", at::zeros({}, at::kLong));
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& value : {c10::IValue(1), c10::IValue(-1.5), c10::IValue("text"), c10::IValue(true),
                                   c10::IValue(), c10::IValue(c10::complex<double>(1, 2))}) {
    list.push_back(value);
  }
  return {pickle_object(tensors), pickle_object(list),
          pickle_object(c10::ivalue::Tuple::create({c10::IValue(list), c10::IValue(int64_t{1} << 40)}))};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(object_pickle, seeds) {
  c10::IValue object;
  try {
    object = unpickle_object({reinterpret_cast<const char*>(data), size});
  } catch (const c10::DistBackendError&) {
    return 0;
  }
  std::string bytes;
  try {
    bytes = pickle_object(object, size_t{1} << 16);
  } catch (const c10::ValueError&) {
    return 0;
  }
  // The object's own lists declare other types than read ones, so the second and third generation are
  // compared.
  const std::string second = pickle_object(unpickle_object(bytes));
  if (pickle_object(unpickle_object(second)) != second) std::abort();
  return 0;
}

}  // namespace lockstep::object_pickle_fuzz

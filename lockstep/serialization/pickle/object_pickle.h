#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <ATen/core/ivalue.h>

/// c10::IValue to bytes and back, as pickles that Python's pickle module writes and reads, tensors included
/// (torch.distributed's _object_to_tensor and _tensor_to_object).
///
/// | IValue | Python |
/// |---|---|
/// | None, Bool, Int, Double, ComplexDouble | None, bool, int (64 bits), float, complex |
/// | String | str; bytes when it is not UTF-8 |
/// | List of anything, Dict, Tuple | list, dict, tuple |
/// | Tensor (CPU, strided) | torch.Tensor without gradient; in C++ no larger than it must be |
/// | Device | torch.device |
///
/// Python's OrderedDict and Counter become Dicts, torch.Size a Tuple, a Parameter a Tensor; attributes that
/// Python code gave a tensor are left out. Lists and Dicts that were read have elements of type Any. What
/// stood in several places stands in several places again. Everything else, in both directions, is an error:
/// containers that contain themselves, integers over 64 bits, sets, objects of classes, functions. Reading
/// calls nothing that the bytes name.
namespace lockstep {

/// How deep containers may be nested.
constexpr int kMaxObjectDepth = 200;

/// How many bytes a pickle may have: LOCKSTEP_MAX_OBJECT_BYTES, 1 GiB unless told. The same on all ranks.
size_t max_object_bytes();

/// The object's pickle (protocol 4). Throws c10::ValueError, with the place within the object, for what can't
/// be pickled, for nesting deeper than kMaxObjectDepth and for more than `max_bytes`. Thread-safe.
std::string pickle_object(const c10::IValue& object, size_t max_bytes = max_object_bytes());

/// The object of a pickle (protocols 2 to 5). `what` begins error messages: "the object of rank 3". Throws
/// c10::DistBackendError with the byte and the opcode for anything that is malformed, hostile or not in the
/// table; hostile are empty containers by the hundred thousand, and dicts whose keys collide. Memory stays
/// below 64 MiB and 300 times the bytes, whatever they say. Thread-safe.
c10::IValue unpickle_object(std::string_view bytes, std::string_view what = "pickle");

}  // namespace lockstep

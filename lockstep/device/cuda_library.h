#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>

#include <lockstep/device/nccl_options.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

/// CUDA, without linking it. liblockstep knows no CUDA; what needs it is in liblockstep_cuda (room `cuda`),
/// which is loaded when the program asks for a CUDA device or for NCCL. So a CPU program has neither its
/// 270 MB nor the time that it takes to load.
///
/// Beware: torch looks for its CUDA part once, when it is first asked about it, and remembers the answer.
/// A program that calls torch::cuda::is_available(), at::hasCUDA() or torch::manual_seed() before the library
/// is there can't use CUDA any more. lockstep::set_device() as a program's first step avoids it, and so does
/// linking Lockstep::cuda, which is there before main(). Nothing in Lockstep asks torch before.
namespace lockstep {

/// What liblockstep_cuda does for the rest. Thread-safe.
class CudaLibrary {
 public:
  virtual ~CudaLibrary() = default;

  /// Why no CUDA device can be used: no driver, one that is too old, no card, or all are hidden. Empty if one
  /// can.
  virtual std::string problem() = 0;
  /// The devices that this process sees; 0 where there is a problem(). Makes no CUDA context.
  virtual int device_count() = 0;
  /// The card behind a device, the same text in all processes of a host and for all instances of a card
  /// (MIG), which NCCL takes for one: "NVIDIA H100 80GB HBM3 (0000:65:00.0)".
  virtual std::string device_identity(int index) = 0;
  /// "NVIDIA H100 80GB HBM3".
  virtual std::string device_name(int index) = 0;
  /// The version of the NCCL library that is loaded: "2.29.7". Needs no card.
  virtual std::string nccl_version() = 0;

  /// A c10d::ProcessGroupNCCL whose operations are in Lockstep's flight recorder as well as in NCCL's own.
  /// Collective over the `size` ranks; `store` is theirs, with a prefix of the group. Its communicator is
  /// made at the first operation on a card. Throws c10::Error when there is no card.
  virtual c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                              int rank, int size, const NcclGroup& group) = 0;
};

/// liblockstep_cuda, loaded at the first call: from the folder of liblockstep, or where the linker finds it.
/// Throws c10::Error that says what is missing and what to do: torch is a CPU build, the library was not
/// found (and where it was looked for), or torch was asked about CUDA before (see above). There may be no
/// driver and no card: its problem() tells. Thread-safe.
CudaLibrary& load_cuda_library();

/// The same, where a CUDA device can be used; throws c10::Error with its problem() otherwise.
CudaLibrary& cuda_library();

/// Why cuda_library() throws, without throwing; empty when it does not. Loads the library.
std::string why_no_cuda();

/// Whether this build has NCCL, with or without a card: torch is a CUDA build, and liblockstep_cuda is there.
/// Loads nothing.
bool nccl_is_built();

/// Whether torch's CUDA part is in this process and torch knows it. Never loads it, and never makes torch
/// look for it before it is loaded.
bool cuda_is_loaded();

/// How many CUDA devices this process sees. Loads the library only where there may be some: a device node of
/// NVIDIA's driver is there, and CUDA_VISIBLE_DEVICES does not hide all. Warns, once, where there are cards
/// that can't be used. Throws c10::Error when torch was asked about CUDA too early.
int cuda_device_count();

namespace cuda_loading {

/// From now on this is the library, and nothing is loaded; null ends that. For tests of what uses it.
void replace_library(CudaLibrary* library);

/// What to say when torch was asked about CUDA too early.
std::string too_early();

/// liblockstep and liblockstep_cuda must be of one build; raised whenever CudaLibrary changes.
constexpr int kInterface = 1;
/// liblockstep_cuda exports this function as lockstep_cuda_library; null for another interface.
using Entry = CudaLibrary*(int interface);

}  // namespace cuda_loading
}  // namespace lockstep

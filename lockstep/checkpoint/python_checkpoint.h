#pragma once

#include <filesystem>
#include <string_view>

#include <ATen/core/ivalue.h>

#include <lockstep/base/errors.h>
#include <lockstep/serialization/state_dict.h>

/// Files of Python's torch.save() and torch.load(weights_only=True). docs/python_checkpoints.md shows both
/// sides.
///
/// | Python | here |
/// |---|---|
/// | dict, OrderedDict, Counter (keys: str, int, float, bool) | dict; a StateDict if all keys are strings |
/// | None, bool, int of 64 bits, float, complex, str | the same |
/// | bytes | a string |
/// | list, tuple, torch.Size | list, tuple |
/// | torch.Tensor, Parameter: strided, any dtype but quantized ones | at::Tensor, on the CPU |
/// | torch.device | c10::Device |
///
/// Tensors that share memory in Python share it here. Nothing in a file is run, looked up or trusted. Sizes
/// are checked before memory is taken: for tensors never more than the file's bytes, for the rest at most 64
/// MiB and 300 times the bytes of the archive's data.pkl; and checksums before bytes are used. Anything else
/// in a file (objects of classes, numpy's numbers, sets, dtypes) is an error that names it.
namespace lockstep {

/// What torch.save(object, path) wrote, whatever it is. Throws CheckpointError that says what is wrong and
/// what to do: damage of any kind, TorchScript archives, torch.save's format from before PyTorch 1.6,
/// big-endian files, objects that are not in the table. Thread-safe.
c10::IValue load_python_object(const std::filesystem::path& path);
/// The same from memory; `name` begins error messages.
c10::IValue parse_python_object(std::string_view bytes, std::string_view name = "torch.save's bytes");

/// The same of a dict whose keys are strings: a state_dict, or the usual {"epoch": …, "model_state_dict": …,
/// "optimizer_state_dict": …, "loss": …}.
///
///     auto checkpoint = lockstep::load_python_checkpoint("net.pt");
///     lockstep::load_state_dict(model, from_object<StateDict>(checkpoint.at("model_state_dict")));
StateDict load_python_checkpoint(const std::filesystem::path& path);

/// Writes what torch.load(path, weights_only=True) reads, in place of a file that is there: under a temporary
/// name that is synced and renamed at the end; such names that killed processes left an hour ago or earlier
/// are removed. Tensors come from any device, and are CPU tensors in the file;
/// views carry only what they show. Throws c10::ValueError, with the place within the object, for what the
/// table above doesn't have, and CheckpointError when the file can't be written. Thread-safe.
void save_python_object(const c10::IValue& object, const std::filesystem::path& path);
void save_python_checkpoint(const StateDict& state, const std::filesystem::path& path);

}  // namespace lockstep

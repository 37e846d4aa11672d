#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/device/nccl_options.h>

namespace lockstep {

/// CudaLibrary::make_nccl_backend.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                    int size, const NcclGroup& group);

}  // namespace lockstep

#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include <lockstep/doctor/facts.h>

namespace lockstep::doctor {

/// Loads Lockstep's part for CUDA and writes what came of it to `out`, for probe_cuda(). Never throws.
void print_cuda_probe(std::ostream& out);

/// What a child process that is started with `argv` and calls print_cuda_probe() says, within 30 s. A child
/// that ends otherwise is an error, in words. Never throws.
CudaPart probe_cuda(const std::vector<std::string>& argv);

/// The reverse of print_cuda_probe(); anything else becomes an error that quotes it.
CudaPart parse_cuda_probe(const std::string& text);

}  // namespace lockstep::doctor

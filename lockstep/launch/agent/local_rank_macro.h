#pragma once

#include <string>

namespace lockstep::launch {

/// A word of the command with torchrun's macro for the local rank, as string.Template has it (macros.substitute in
/// torch/distributed/elastic/utils/api.py). Unlike there a word without the macro keeps its $$, a shell's process id.
std::string with_local_rank(const std::string& word, int local_rank);

}  // namespace lockstep::launch

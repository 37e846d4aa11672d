#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// `lockstep bench`: times the collectives between the ranks of a job and checks their results, after
/// nccl-tests and the OSU benchmarks. docs/bench.md says how it measures and what the columns mean.
namespace lockstep::bench {

/// Where the tensors lie: in memory that all ranks see (empty_shared), or anywhere, so that their bytes pass
/// through the transport's scratch.
enum class MemoryKind { kArena, kStaged };

/// What to measure. The defaults are those of the command.
struct BenchOptions {
  /// Names, see known_collectives(); none, or "all": all of them.
  std::vector<std::string> collectives = {};
  /// Ranks to start, as parse_nprocs() reads it; nothing: 2, or the job that this process belongs to.
  std::optional<std::string> nproc_per_node = {};
  /// Bytes, each from the last by the factor; without one of them the default, or the other if that is
  /// beyond it.
  std::optional<int64_t> min_bytes = {};
  std::optional<int64_t> max_bytes = {};
  int64_t step_factor = 4;
  int64_t iterations = 20;  ///< that are timed
  int64_t warmup = 5;       ///< that come before
  std::string dtype = "float";
  std::string reduce_op = "sum";
  int root = 0;
  MemoryKind memory = MemoryKind::kArena;
  bool in_place = true;
  bool out_of_place = true;
  /// A file for the results as JSON, "-" for standard output (the table then goes to standard error).
  std::string json = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of the meeting and of each operation
};

/// "all_reduce, reduce, …"
std::string known_collectives();

/// The number of bytes in texts such as "4096", "4K", "100M", "1GiB" (powers of 1024; B, KB, KiB, any case).
/// `option` is named in the error. Throws c10::ValueError for anything else and for less than 1 byte.
int64_t parse_size(const std::string& text, const std::string& option);

/// Measures, and writes the table (rank 0 alone). A process that a launcher started (RANK and so on) joins
/// its job; any other starts the ranks itself by starting its own program again: the call then runs in each
/// of them, so that nothing before it may have effects that must happen once.
///
/// Returns the exit status: 0; 1 when a result was wrong or a rank failed; 2 when the buffers don't fit into
/// memory; 128 + N when signal N ended it. Throws c10::ValueError for options that make no sense, before
/// anything is started (in a job on rank 0, the others return 2), and whatever the process group throws. To
/// be called by the main thread of a program that does nothing else.
int run(const BenchOptions& options);

}  // namespace lockstep::bench

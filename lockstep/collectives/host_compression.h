#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

/// In what form the float32 sums and averages of all_reduce(), all_reduce_coalesced() and reduce() travel between
/// hosts, if they are of 16 KiB and more. Within a host, and where all ranks of a group are on one host, it changes
/// nothing; nor does it for other types, for smaller tensors, for other reduce operations and for other collectives.
/// All ranks get the same bits.
enum class HostCompression : uint8_t {
  kNone,  ///< as they are
  kBf16,  ///< 16 bits: 8 bits of precision, float32's range
  /// 8 bits, with a scale for each 256 elements. An element that is NaN or infinite makes its 256 elements NaN.
  /// DistributedDataParallel adds what the rounding lost to the next step's gradients; elsewhere see BetweenHosts.
  kInt8,
};

/// Throws c10::ValueError for a number that is none of them; `option` begins the message.
HostCompression checked_compression(HostCompression compression, const char* option);
/// "none", "bf16", "int8". Static storage.
const char* to_string(HostCompression compression);

/// What the rounding to 8 bits has lost of one tensor that is reduced again and again, as a bucket of gradients is. One
/// reduction at a time uses it. Each rank keeps the errors of what it encodes itself, by the element's place in that.
/// After a reduction that failed they are those of what it had encoded by then: no more than any step's rounding, so
/// they may be used again.
class ErrorFeedback {
 public:
  /// The errors of this rank's part of the host's sum, and of the result that it sends to other hosts. `divisor`: by which the
  /// sum is divided: the number of ranks of an average, 1 of a sum. Zeros where one of both is another than before, for errors
  /// are in units of what was encoded.
  float* of_partial(size_t count, int64_t divisor) { return partial_.of(count, divisor); }
  float* of_result(size_t count, int64_t divisor) { return result_.of(count, divisor); }

 private:
  struct Errors {
    float* of(size_t count, int64_t by) {
      if (values.size() != count || divisor != by) values.assign(count, 0);
      divisor = by;
      return values.data();
    }
    std::vector<float> values;
    int64_t divisor = 1;
  };

  Errors partial_;
  Errors result_;
};

/// How the reductions travel that this thread starts while it lives: for programs that average gradients themselves.
///
///     const BetweenHosts scope(HostCompression::kInt8, feedback_of_this_tensor);
///     all_reduce(gradient, ReduceOp::AVG);
class BetweenHosts {
 public:
  /// Without a compression the group's holds; without a feedback kInt8's errors are lost.
  explicit BetweenHosts(std::optional<HostCompression> compression,
                        std::shared_ptr<ErrorFeedback> feedback = nullptr);
  BetweenHosts(const BetweenHosts&) = delete;
  BetweenHosts& operator=(const BetweenHosts&) = delete;
  ~BetweenHosts();

  /// What this thread's innermost scope says; empty without one.
  static std::optional<HostCompression> compression();
  static std::shared_ptr<ErrorFeedback> feedback();

 private:
  std::optional<HostCompression> compression_;
  std::shared_ptr<ErrorFeedback> feedback_;
  const BetweenHosts* before_;
};

}  // namespace lockstep

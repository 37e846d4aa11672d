#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/internal/gather/access_observer.h>
#include <lockstep/parallel/fsdp/internal/row_memory.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>

namespace lockstep::fsdp::internal {

/// Weights of which a rank has its own rows alone. Units of them are gathered into memory that is theirs until they are
/// freed: the parameters keep their storages, which get this memory and lose it again (though not their sizes), so that
/// what autograd has saved, and views, are filled as well. What reads a storage that has none throws c10::Error, with the
/// parameter's name or, after refuse(), with a failure's text. Used by one thread at a time.
///
/// A unit's rows travel as bytes in one operation, each weight's straight to its place: a rank has most_rows() of each, so
/// the ranks' rows, one rank's after the other's, are the weight.
///
/// On a device units are gathered on a stream of their own, into memory that its allocator has for that stream, beside
/// what other streams compute. The host waits for the other ranks' headers, in an operation of their own on the CPU, and
/// with `most_in_use` until the device has used so many units' memory that a next one may have it.
class GatheredWeights final : public ShardedWeights {
 public:
  /// `units`: indices into all(), each in one; `names` are for messages; `offload`: the rows are in files in this
  /// directory, and are brought to the device when they are gathered. Throws what RowMemory does.
  GatheredWeights(const std::vector<NamedTensor>& parameters, const std::vector<WeightDtypes>& dtypes,
                  std::shared_ptr<const ShardGroups> groups, c10::Device device,
                  std::vector<std::vector<size_t>> units, std::vector<std::string> names,
                  std::optional<size_t> most_in_use, const std::optional<std::filesystem::path>& offload);
  ~GatheredWeights() override;

  /// Is told of operators that are given the parameters.
  void set_listener(std::weak_ptr<AccessListener> listener) { slot_->listener = std::move(listener); }

  size_t units() const { return units_.size(); }
  size_t unit_of(size_t weight) const { return unit_of_[weight]; }
  const std::string& name(size_t unit) const { return units_[unit].name; }
  /// Whether a weight of it requires no gradients.
  bool has_frozen(size_t unit) const;

  /// What is gathered from now on is to have the rows as the current stream has them.
  void begin_pass();
  /// Starts to gather a unit; collective, in the same order on all ranks. `note` is told to all ranks. Without `early` it is done
  /// when this returns, and finish() is to follow. Throws what operations of the group throw.
  void start(size_t unit, int64_t note, bool early);
  /// Waits for it, and lets the parameters have the values. Returns the smallest of the ranks' notes. Throws
  /// c10::DistBackendError also when a rank has gathered another unit.
  int64_t finish(size_t unit);
  /// What the calling thread's current stream does from now on may use a unit that is whole.
  void use_on_current_stream(size_t unit);
  /// Frees what finish() has given. Throws c10::Error that names a parameter that has been written to.
  void free(size_t unit);
  /// What is read from now on of units that are not whole throws this text.
  void refuse(const std::string& text);

  void check_in_place() const override;
  void copy(size_t index, const at::Tensor& whole) const override;
  bool copies_by_gathering() const override { return true; }

 protected:
  OwnRows own_rows_place(size_t index) const override;
  at::Tensor in_view(size_t index) const override { return parameters_[index]; }

 private:
  /// What ranks tell each other beside the rows.
  using Header = std::array<int64_t, 2>;  // the unit, and the note
  struct Unit {
    std::string name;
    std::vector<size_t> weights;
    std::vector<int64_t> offsets;  // in the memory, by weight; after the last one its size
    at::Tensor memory = {};        // while it is gathered, and whole
    Header header = {};
    std::vector<Header> headers = {};    // of all ranks
    std::vector<at::Tensor> parts = {};  // this rank's, until the work is done
    Work work = {};
    Work header_work = {};                     // on a device; otherwise they are in `work`, too
    std::optional<c10::Stream> ready_on = {};  // the stream for which it is whole, on a device
    std::vector<uint32_t> versions = {};       // of the parameters, when they got the values
  };

  int64_t row_bytes(size_t weight) const;
  int64_t most_bytes(size_t weight) const;  // of a rank's rows
  void check_headers(size_t unit) const;
  void await_room();
  void set_memory(size_t weight, void* memory);
  void refuse_access(size_t weight, const std::string& text);

  std::vector<size_t> unit_of_;
  std::vector<Unit> units_;
  std::vector<int64_t> own_offsets_;  // in the rows' memory, by weight
  std::shared_ptr<RowMemory> own_;
  const std::shared_ptr<AccessListenerSlot> slot_;
  std::vector<at::Tensor> parameters_;  // with the storages that the module's parameters have
  std::string refusal_;                 // empty while nothing has failed
  std::optional<c10::Stream> stream_;   // on which units are gathered; none on the CPU
  const std::optional<size_t> most_in_use_;
  std::deque<c10::Event> freed_;  // when units that the host has freed are so on the device, the oldest first
};

/// Whether a parameter is one of a GatheredWeights that is gone perhaps, so that it has no values.
bool is_gathered_parameter(const at::Tensor& parameter);

}  // namespace lockstep::fsdp::internal

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/pipeline/internal/device_links.h>

namespace lockstep {
class LockstepBackend;
}

namespace lockstep::pipeline::internal {

/// Lists of tensors between the ranks of a group, whose number, shapes, dtypes and orders in memory the receiver need not
/// know: a message in front tells them, and brings small tensors itself. Undefined tensors arrive undefined, and whether
/// one requires a gradient is told.
///
/// Tensors on a device go by DeviceLinks where each rank has one device. Then all that a rank sends to another one comes
/// in one order, whatever its tag is, so that the receiver can start to receive it in that order; and the receiver keeps
/// what it has not asked for yet. Elsewhere they pass through the host's memory.
///
/// Sends never wait. Within a host a tensor is copied once into shared memory, from where the receiver takes it without the
/// sender; between hosts background threads of the group move it, whatever sender and receiver compute. Lists of one sender
/// with one tag arrive in order, if each is taken before the next one is asked for. Used by one thread. Errors are those of the group's messages.
class TensorMessages {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// `device`: this rank's, where all ranks have one of the same kind: collective then, and `ordered_tag` is a tag that
  /// is used by none of the lists. The group has a Lockstep backend for CPU tensors.
  explicit TensorMessages(const ProcessGroup& group, std::optional<c10::Device> device = {},
                          int ordered_tag = 0);
  ~TensorMessages();

  /// `to`: a group rank. Throws c10::ValueError for tensors that are sparse or quantized.
  void send(const Tensors& tensors, int to, int tag);
  /// Waits until all that was sent has arrived.
  void finish_sends();
  /// Waits until what was sent with this tag has arrived.
  void finish_sends(int tag);
  /// Forgets sends that have arrived; without waiting.
  void collect_sends();
  /// Fails the devices' messages on all ranks.
  void abort_links() const noexcept {
    if (links_) links_->abort();
  }
  /// DeviceLinks::connect() of the ranks that will send each other lists; nothing without links. Collective.
  void connect(const std::set<std::pair<int, int>>& pairs) {
    if (links_) links_->connect(pairs);
  }
  /// The groups of the devices' messages, which fail by themselves.
  std::vector<ProcessGroup> link_groups() const {
    return links_ ? links_->groups() : std::vector<ProcessGroup>();
  }
  /// The bytes of sends that had not arrived at the last collect_sends().
  int64_t bytes_in_flight() const { return bytes_in_flight_; }
  /// Whether the rank is on another host.
  bool is_far(int rank) const;

  class Arrival;

  /// A list that is asked for.
  class Receipt {
   public:
    /// Asks for the rest as soon as the message in front is there; does not wait.
    void advance();
    /// Waits for the tensors; each on `device`. Once.
    Tensors take(const c10::Device& device);
    /// Of what has come or is coming, once it is described.
    int64_t bytes() const;

   private:
    friend class TensorMessages;
    Receipt(TensorMessages& messages, int from, int tag);

    TensorMessages& messages_;
    int from_;
    int tag_;
    std::shared_ptr<Arrival> arrival_;  // none while lists that were sent before are looked through
  };
  std::shared_ptr<Receipt> receive(int from, int tag);

 private:
  /// What comes from a rank in one order.
  struct Incoming {
    std::shared_ptr<Arrival> next;
    std::map<int, std::deque<std::shared_ptr<Arrival>>> kept;  // by tag
  };

  std::shared_ptr<Arrival> find_arrival(int from, int tag, bool waits);
  struct Sending {
    c10::intrusive_ptr<c10d::Work> work;
    int tag;  // of the list
    int64_t bytes;
    at::Tensor on_device = {};  // which the device reads until then
  };

  void start_send(const at::Tensor& memory, int to, int tag, int64_t bytes);
  int tag_of_messages(int tag) const { return links_ ? ordered_tag_ : tag; }
  std::shared_ptr<Arrival> start_arrival(int from, int tag);

  ProcessGroup group_;
  c10::intrusive_ptr<LockstepBackend> backend_;
  std::optional<DeviceLinks> links_;
  const int ordered_tag_;
  std::map<int, Incoming> incoming_;  // with links, by rank
  std::vector<Sending> sending_;
  int64_t bytes_in_flight_ = 0;
};

}  // namespace lockstep::pipeline::internal

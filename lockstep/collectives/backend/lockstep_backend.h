#pragma once

#include <atomic>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/collectives/backend/internal/operation_queue.h>
#include <lockstep/collectives/host_compression.h>
#include <lockstep/collectives/hosts/cost_model.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/transport/group_channel.h>

namespace lockstep {

struct Signature;
namespace collectives::internal {
struct PlannedOperation;
struct Reducing;
class StagingArea;
}  // namespace collectives::internal

/// Where the program is while this object lives in this thread, and what operations are for, which flight records and
/// traces say, and of kToldPurposes the errors of all ranks. Without a purpose they are for what the one around it says.
class CallSite {
 public:
  static constexpr std::string_view kCheckpoint = "a checkpoint";  // of kToldPurposes

  /// `purpose`: lives as long as this object.
  explicit CallSite(std::string_view purpose,
                    const std::source_location& where = std::source_location::current());
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;
  ~CallSite();
  /// What operations that this thread starts now are for.
  static std::string_view purpose();
  /// To be called with no lock held: a finder may wait.
  static void tell(flight::ObservedOperation& operation);

  /// Finds out where the calling thread is, for calls that no CallSite surrounds: those of another language.
  using Finder = flight::CodePlace (*)();
  /// One for the process; null for none, as at the start. Thread-safe.
  static void set_finder(Finder finder);

 private:
  const CallSite* before_;
  std::string_view purpose_;
  std::source_location where_;
};

/// The c10d backend "lockstep": collectives among ranks, through shared memory within a host and by messages
/// between hosts.
///
/// Tensors are on the CPU or on an accelerator, all of one call on one device; ranks may differ in that.
/// Those on an accelerator pass through the host's memory, on streams of the group's own, with the manners of
/// c10d's backends for devices: a call takes the values that the current stream will have made, wait() ends
/// on the host when the operation is done, and then has the current stream wait for the results.
///
/// The backend of every c10d::ProcessGroup that init_process_group() and new_group() give. Collectives run in order
/// of submission; reductions in rank order, so all ranks and all runs get the same bits. Sends and receives
/// have an order of their own, per pair of ranks and tag. After a failure every further operation fails with
/// the first cause. What each operation takes and gives: functional.h. Thread-safe.
class LockstepBackend : public c10d::Backend {
 public:
  struct Settings;
  using Make = c10::intrusive_ptr<LockstepBackend> (*)(std::shared_ptr<transport::GroupChannel>, Settings);
  struct Settings {
    std::string name;  // of the group, for messages
    std::chrono::milliseconds timeout{};
    std::vector<int> global_ranks = {};                      // in group order; empty: those of the transport
    HostCompression between_hosts = HostCompression::kNone;  // of reductions outside of a BetweenHosts
    hosts::CostModel wire_model = {};                        // the same on all members of a group over hosts
    /// For programs that ask for "gloo": called so in profiles, errors end with Gloo's words, and an
    /// all_gather's future has Gloo's form.
    bool stands_in_for_gloo = false;
    /// Makes backends of a subclass: those that come from this one by split(), merge() and shrink(), too.
    Make make_subclass = nullptr;
    /// Where the members of a group over hosts meet that go on without the others.
    c10::intrusive_ptr<c10d::Store> store = {};
  };

  LockstepBackend(std::shared_ptr<transport::GroupChannel> channel, Settings settings);
  ~LockstepBackend() override;
  /// Makes one of the class that the settings name.
  static c10::intrusive_ptr<LockstepBackend> make(std::shared_ptr<transport::GroupChannel> channel,
                                                  Settings settings);

  const std::string getBackendName() const override { return "lockstep"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    timeout_ms_ = timeout.count();
  }
  /// What c10d::ProcessGroupGloo::Options begins with, in the same places.
  struct GroupOptions final : Options {
    using Options::Options;
    std::vector<std::shared_ptr<void>> devices;
    int threads = 2;
    HostCompression between_hosts = HostCompression::kNone;  // of reductions outside of a BetweenHosts
  };
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  HostCompression between_hosts() const { return settings_.between_hosts; }
  bool supportsSplitting() const override { return true; }
  /// A backend for `ranks` of this group, which alone call it. `store` is new, or has a prefix of its own; null
  /// on ranks that are not among them.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  /// A backend for `size` ranks, of which this one is `rank`, from this group and others.
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;
  bool supportsShrinking() const override { return true; }
  /// A backend for those members that live and are not among `ranks_to_exclude` (group ranks), which alone call
  /// it: shrink_group() says the rest. This group stays, to be shut down.
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags = 0,
                                     const c10::intrusive_ptr<Options>& opts_override = nullptr) override;
  /// Sequence numbers are the queue's own; nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return queue_->submitted(); }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& output_lists,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = {}) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  /// From when the group's timeout of a message counts.
  enum class TimedFrom { kStart, kWait };
  /// send(), recv() and recvAnysource() in one; `background`: it must advance even if no thread waits for it. With
  /// TimedFrom::kWait it does not time out before a thread calls wait().
  c10::intrusive_ptr<c10d::Work> message(bool is_send, const at::Tensor& tensor, int peer, int tag,
                                         bool background, TimedFrom timed_from = TimedFrom::kStart);

  /// A flat, uninitialised CPU tensor of `size` elements in the arena, where collectives need not copy. Keeps
  /// the arena alive. Tensors on a device are copied in any case, so there is no such memory for them: throws
  /// c10::ValueError for other devices in `options`.
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  /// c10d gives nothing but a device's index, which the CPU has none of: true for -1. A caller that knows the kind of
  /// device asks for CPU tensors only, and takes at::empty() for others.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }

  /// Runs or awaits the collectives submitted so far; their errors stay in their works.
  void finish();
  /// Fails the group on all ranks; from any thread.
  void abort() override { abort(""); }
  /// With a reason, which the other ranks' errors tell.
  void abort(const std::string& reason);
  /// Finishes the collectives submitted so far (as Gloo does), ends sends and receives that are not done;
  /// further ones fail. After abort() it returns at once.
  void shutdown() override;
  /// The same for callers that can't be refused: in a callback it goes on in a thread of its own.
  void end();
  /// Throws c10::DistBackendError in a callback of one of this group's futures, which shutdown() would wait
  /// for.
  void check_not_in_callback() const;
  bool is_in_callback() const;
  /// For a process that ends: like shutdown(), but does not wait for collectives that are not done: they
  /// fail, on all ranks. `by_exception`: aborts the group.
  void close_at_exit(bool by_exception);

  /// Throws c10::DistBackendError in a child that was forked since the group was made.
  void check_not_forked() const;
  const std::string& name() const { return settings_.name; }
  /// The timeout of operations that are given none.
  std::chrono::milliseconds timeout() const { return timeout_or_default({}); }
  transport::GroupChannel& channel() { return *channel_; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return settings_.store; }
  bool spans_hosts() const { return channel_->spans_hosts(); }

 protected:
  // The calls above take one tensor a rank; these take several, as c10d::ProcessGroupGloo does. The caller
  // has checked that there is one, that all have one dtype, layout and size, and that the lists' lengths
  // match. For the other ranks they are the same operations.

  /// All tensors of all ranks make one result, which replaces each of them. AVG divides by the number of
  /// ranks.
  c10::intrusive_ptr<c10d::Work> allreduce_several(std::vector<at::Tensor>& tensors,
                                                   const c10d::AllreduceOptions& options);
  /// The root's tensor number options.rootTensor replaces all tensors of all ranks, the root's among these.
  c10::intrusive_ptr<c10d::Work> broadcast_several(std::vector<at::Tensor>& tensors,
                                                   const c10d::BroadcastOptions& options);
  /// Each list of outputs gets all inputs of rank 0, of rank 1, and so on. The future's value has these
  /// lists.
  c10::intrusive_ptr<c10d::Work> allgather_several(std::vector<std::vector<at::Tensor>>& outputs,
                                                   std::vector<at::Tensor>& inputs,
                                                   const c10d::AllgatherOptions& options);

 private:
  c10::intrusive_ptr<c10d::Work> submit(collectives::internal::PlannedOperation operation);
  /// The signature of a reduction that this thread starts.
  Signature reducing_signature(const Signature& signature,
                               const collectives::internal::Reducing& reducing) const;
  /// The compression of a group that is made from this one with such options; null, or another backend's: as here.
  HostCompression between_hosts_of(const Options* options) const;
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  int checked_root(int64_t root, const char* operation, const char* role) const;

  // The first two stand where c10d::ProcessGroupGloo has its store and its options: DDP's logger takes any
  // backend of a group called "gloo" for one, unasked, and reads options_->threads (c10d/logger.cpp).
  std::shared_ptr<transport::GroupChannel> channel_;
  c10::intrusive_ptr<GroupOptions> options_;
  Settings settings_;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;
  std::shared_ptr<collectives::internal::StagingArea> staging_;
  std::shared_ptr<collectives::internal::OperationQueue> queue_;
  std::shared_ptr<const flight::ObservedGroup> flight_group_;
  std::atomic<uint64_t> messages_{0};  // sends and receives so far
  std::atomic<uint64_t> monitored_barriers_{0};
};

/// The group's backend for tensors on the CPU; null if that is not one of these.
c10::intrusive_ptr<LockstepBackend> lockstep_backend_of(c10d::ProcessGroup& group);

}  // namespace lockstep

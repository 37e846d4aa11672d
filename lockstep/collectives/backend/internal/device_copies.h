#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <lockstep/base/deadline.h>
#include <lockstep/collectives/backend/internal/shared_tensor.h>
#include <lockstep/transport/group_channel.h>

/// How tensors on accelerators take part in operations that happen in host memory: they are copied into the
/// group's shared memory before and back after, on streams of the group's own. The caller's stream goes on
/// meanwhile; the host waits only where the data are about to be read. docs/internals/shared_memory.md, "Devices".
namespace lockstep::collectives::internal {

class DeviceCopies;

/// A c10::Event that never leaves its device. c10's own goes to the event's device and back for each call,
/// its end among these; with CUDA that makes a context on device 0, of hundreds of megabytes, in each thread
/// whose current device was never set.
class DeviceEvent {
 public:
  explicit DeviceEvent(c10::Device device) : device_(device), event_(device.type()) {}
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  ~DeviceEvent();

  c10::Device device() const { return device_; }
  void record(const c10::Stream& stream);
  /// Has what the stream is given from now on wait for the event.
  void block(const c10::Stream& stream) const;
  /// Whether the device has come there; true before the first record().
  bool passed() const { return event_->query(); }
  /// The same after an error of the device, too, which then shows elsewhere.
  bool passed_or_lost() const noexcept;

 private:
  c10::Device device_;
  std::optional<c10::Event> event_;
};

/// The way of one operation's results to their device. Recorded by the thread that runs the operation, before
/// others see that it is done; then any thread may ask.
class DeviceResults {
 public:
  explicit DeviceResults(c10::Device device) : copied_(device) {}

  c10::Device device() const { return copied_.device(); }
  /// Whether they are there.
  bool arrived() const noexcept { return copied_.passed_or_lost(); }
  /// Whether their copies have been started: block() then means something.
  bool begun() const noexcept { return begun_.load(std::memory_order_acquire); }
  /// Has what `stream` is given from now on wait for the results.
  void block(const c10::Stream& stream) const { copied_.block(stream); }
  /// The same for the calling thread's current stream.
  void order_current_stream() const;
  /// Completes a future, made for this device, with what `value` returns. Streams that take it from there are
  /// ordered in the same way.
  void complete(c10::ivalue::Future& future, const std::function<c10::IValue()>& value) const;

 private:
  friend class DeviceCopies;
  DeviceEvent copied_;
  std::atomic<bool> begun_{false};
  std::vector<at::Tensor> made_;  // on the group's stream, for the user
};

/// What a group has for its devices: two streams for each, and the copies that are still in progress.
/// Thread-safe.
class StagingArea {
 public:
  struct Streams {
    c10::Stream down;  // to the host
    c10::Stream up;
  };

  explicit StagingArea(std::shared_ptr<transport::Arena> arena) : arena_(std::move(arena)) {}

  /// Shared memory, page-locked for this kind of device if that is possible.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);
  /// Says that an operation's results will be written to a tensor, …
  void announce(const at::Tensor& tensor, const std::shared_ptr<DeviceResults>& results);
  /// … and whose results are on their way to a tensor's memory: those that an operation called later must
  /// see.
  std::vector<std::shared_ptr<DeviceResults>> announced(const at::Tensor& tensor);
  /// The group's streams of a device; two, for copies down must not wait behind copies up whose tensors are
  /// still in use.
  Streams streams(c10::Device device);
  /// Holds what the copies use until the device is done with it.
  void keep(std::shared_ptr<DeviceCopies> copies) noexcept;
  /// Lets go of what is done.
  void release_done();
  /// Waits until all is done. What a device does not finish by the deadline is never given back.
  void close(const Deadline& deadline);

 private:
  std::shared_ptr<transport::Arena> arena_;
  std::mutex mutex_;
  std::vector<std::pair<c10::Device, Streams>> streams_;
  std::list<std::shared_ptr<DeviceCopies>> kept_;
  struct Announcement {
    MemorySpan memory;
    std::weak_ptr<DeviceResults> results;
  };
  std::vector<Announcement> announcements_;
  bool closed_ = false;
};

/// The copies of one operation between one device and the host. Used by one thread at a time.
class DeviceCopies {
 public:
  /// What follows comes after all that the calling thread's current stream of `device` has been given so far.
  /// Throws c10::ValueError while that stream is being captured into a graph.
  DeviceCopies(std::shared_ptr<StagingArea> area, c10::Device device);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  c10::Device device() const { return results_->device(); }
  const std::shared_ptr<DeviceResults>& results() const { return results_; }
  const std::shared_ptr<StagingArea>& area() const { return area_; }

  /// Host memory of this shape, kept until the copies are done.
  at::Tensor host(at::IntArrayRef sizes, at::ScalarType dtype);
  /// host() memory that has the tensor's values once await_fetched() has returned. The tensor is kept until
  /// then. The values are those that the caller's stream and earlier operations of the group will have made.
  at::Tensor fetch(const at::Tensor& tensor);
  /// The same of tensors of one dtype, one after the other.
  at::Tensor fetch_flat(const std::vector<at::Tensor>& tensors);
  /// A sparse COO tensor, coalesced, in host memory. Waits as await_fetched() does; undefined if the group
  /// has failed.
  at::Tensor fetch_sparse(const at::Tensor& tensor, const transport::GroupChannel& channel,
                          const Deadline& deadline);
  /// Returns when what fetch() has given holds the values. False if the group has failed before. Throws
  /// ChannelError when the deadline has passed, and what an interrupt check throws.
  bool await_fetched(const transport::GroupChannel& channel, const Deadline& deadline);

  /// Says what bring() will write, so that operations called from now on take their values from there.
  void will_bring(const at::Tensor& to) { area_->announce(to, results_); }
  /// After the last bring().
  void brought() noexcept { results_->begun_.store(true, std::memory_order_release); }
  /// Starts copying host memory to a tensor, whose shape may differ; what the caller's stream did with the
  /// tensor comes first.
  void bring(const at::Tensor& to, const at::Tensor& from);
  /// The same to several tensors, one after the other.
  void bring_flat(const std::vector<at::Tensor>& to, const at::Tensor& from);
  /// Replaces a sparse tensor by one in host memory.
  void bring_sparse(const at::Tensor& to, const at::Tensor& from);

  /// Whether the device uses none of this any more.
  bool done() const noexcept;

 private:
  friend class StagingArea;
  bool await(const DeviceEvent& event, const transport::GroupChannel& channel,
             const Deadline& deadline) const;
  void start_fetch(const std::vector<at::Tensor>& from, std::function<void()> copy);
  void begin_to_bring();
  void use_on_up_stream(const at::Tensor& tensor) const;
  at::Tensor on_device(const at::Tensor& from);

  std::shared_ptr<StagingArea> area_;
  StagingArea::Streams streams_;
  // Copies of what earlier operations have not written yet; and these operations' results.
  std::vector<std::function<void()>> deferred_;
  std::vector<std::shared_ptr<DeviceResults>> after_;
  DeviceEvent called_;   // in the caller's stream
  DeviceEvent fetched_;  // in the stream down
  std::shared_ptr<DeviceResults> results_;
  bool bringing_ = false;
  std::shared_ptr<DeviceCopies> itself_;  // see StagingArea::keep()
  std::vector<at::Tensor> sources_;       // on the device, until they are fetched
  std::vector<at::Tensor> used_;          // host buffers, and what passes between them and the results
};

}  // namespace lockstep::collectives::internal

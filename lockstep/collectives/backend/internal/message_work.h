#pragma once

#include <mutex>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/collectives/backend/internal/work_record.h>
#include <lockstep/transport/group_channel.h>

namespace lockstep::collectives::internal {

class DeviceCopies;
class DeviceResults;
class StagingArea;

/// What programs written for Gloo look for in an error's text; stands at its end. "" where Gloo has no words.
std::string gloos_words(transport::FailureKind kind, std::chrono::milliseconds timeout);

/// One send or receive: the handle that users wait on. Thread-safe. Keeps the tensor and the channel alive.
///
/// A tensor on a device passes through the host's memory: start() of a send waits until it is there, for
/// messages keep their order; what a receive brings, the waiting thread's current stream waits for.
class MessageWork final : public c10d::Work {
 public:
  struct Message {
    const char* title = "";  // in profiles
    bool is_send = false;
    at::Tensor tensor;
    int peer = transport::MessageChannel::kAnySource;  // group rank
    int64_t tag = 0;
    std::chrono::milliseconds timeout{};
    bool timed_from_wait = false;  // and not from the start
    std::string group_name;
    uint64_t number = 0;       // among the group's point-to-point operations
    bool gloos_words = false;  // in errors
  };

  /// Starts the message; `background`: it must advance even if no thread waits. `area`: the group's, for tensors
  /// on devices.
  static c10::intrusive_ptr<MessageWork> start(std::shared_ptr<transport::GroupChannel> channel,
                                               const std::shared_ptr<StagingArea>& area, Message message,
                                               uint64_t record, bool background);

  MessageWork(std::shared_ptr<transport::GroupChannel> channel, Message message, uint64_t record);
  ~MessageWork() override;

  /// On the device, too.
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// The sender's group rank, of a receive that is done.
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return {message_.tensor}; }
  void synchronize() override { wait(); }
  /// Throws c10::DistBackendError or DistTimeoutError with the message in words. A `timeout` other than
  /// kNoTimeout bounds this wait only.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return message_.number; }
  float getDuration() const override;

 private:
  void stage(const std::shared_ptr<StagingArea>& area, const Deadline& deadline);
  void complete(const std::exception_ptr& error);  // once, after the channel is done with it
  std::exception_ptr bring() const;
  void tell(c10::ivalue::Future& future, const std::exception_ptr& error) const;
  std::exception_ptr in_words(const std::exception_ptr& error) const;

  std::shared_ptr<transport::GroupChannel> channel_;
  Message message_;
  uint64_t record_;
  WorkRecord profiled_;  // the first wait; without one, a point where the message ends
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  transport::MessageChannel::Handle handle_;
  at::Tensor memory_;  // the tensor, or what stands for it on the host
  // Of tensors on a device:
  std::shared_ptr<DeviceCopies> copies_;
  std::shared_ptr<DeviceResults> results_;

  std::once_flag waited_;
  std::once_flag completed_;
  mutable std::mutex mutex_;  // of what follows
  bool done_ = false;
  std::exception_ptr error_;
  std::chrono::steady_clock::duration duration_{};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// What the group says of a failed operation, in the terms of the operation.
std::string describe_message(const MessageWork::Message& message, const transport::GroupChannel& channel);

}  // namespace lockstep::collectives::internal

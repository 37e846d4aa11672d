#include <array>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/simulated_device/streams.h>

namespace lockstep::testing::simulated {
namespace {

/// The default stream and a pool of others.
constexpr int kStreams = 1 + 8;

using Streams = std::array<std::array<StreamQueue, kStreams>, kDevices>;

/// Never destroyed, for their threads run until the process ends.
Streams& all_streams() {
  static auto* streams = new Streams();
  return *streams;
}

struct ThreadState {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kDevices> streams{};
};
thread_local ThreadState thread_state;

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no simulated device ", static_cast<int>(index),
              ", only 0 to ", kDevices - 1);
  return index;
}

c10::DeviceIndex or_current(c10::DeviceIndex index) {
  return index == -1 ? thread_state.device : checked(index);
}

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), id);
}

}  // namespace

void StreamQueue::submit(std::function<void()> function) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(function));
  ++submitted_;
  if (!std::exchange(has_thread_, true)) std::thread([this] { work(); }).detach();
  changed_.notify_all();
}

bool StreamQueue::run_if_idle(const std::function<void()>& function) {
  {
    std::lock_guard lock(mutex_);
    if (submitted_ != finished_) return false;
    ++submitted_;
    running_in_caller_ = true;
  }
  struct Done {
    StreamQueue& stream;
    ~Done() {
      std::lock_guard lock(stream.mutex_);
      ++stream.finished_;
      stream.running_in_caller_ = false;
      stream.changed_.notify_all();
    }
  } done{*this};
  function();
  return true;
}

void StreamQueue::submit_or_run(std::function<void()> function) {
  if (!run_if_idle(function)) submit(std::move(function));
}

void StreamQueue::run(const std::function<void()>& function) {
  if (run_if_idle(function)) return;
  std::exception_ptr error;
  auto done = std::make_shared<Recording>();
  submit([&, done] {
    try {
      function();
    } catch (...) {
      error = std::current_exception();
    }
    done->complete();
  });
  done->wait();
  if (error) std::rethrow_exception(error);
}

bool StreamQueue::idle() {
  std::lock_guard lock(mutex_);
  return submitted_ == finished_;
}

void StreamQueue::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&, awaited = submitted_] { return finished_ >= awaited; });
}

void StreamQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() && !running_in_caller_; });
    auto function = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    function();
    function = nullptr;  // what it holds goes before the stream counts as idle
    lock.lock();
    ++finished_;
    changed_.notify_all();
  }
}

void Recording::complete() {
  std::lock_guard lock(mutex_);
  done_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Recording::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Recording::done() {
  std::lock_guard lock(mutex_);
  return done_;
}

std::chrono::steady_clock::time_point Recording::time() {
  std::lock_guard lock(mutex_);
  return time_;
}

c10::DeviceIndex current_device() {
  return thread_state.device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  return std::exchange(thread_state.device, checked(index));
}

c10::Stream current_stream_of(c10::DeviceIndex index) {
  index = or_current(index);
  return stream_of(index, thread_state.streams[index]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto index = checked(stream.device_index());
  return stream_of(index, std::exchange(thread_state.streams[index], stream.id()));
}

c10::Stream default_stream_of(c10::DeviceIndex index) {
  return stream_of(or_current(index), 0);
}

c10::Stream pool_stream_of(c10::DeviceIndex index) {
  static std::array<std::atomic<unsigned>, kDevices> next{};
  index = or_current(index);
  return stream_of(index, 1 + next[index]++ % (kStreams - 1));
}

StreamQueue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == c10::kPrivateUse1 && stream.id() >= 0 && stream.id() < kStreams, stream,
              " is no stream of the simulated device");
  return all_streams()[checked(stream.device_index())][stream.id()];
}

StreamQueue& current_queue(c10::DeviceIndex index) {
  return queue_of(current_stream_of(index));
}

void synchronize_device(c10::DeviceIndex index) {
  for (auto& stream : all_streams()[or_current(index)]) stream.synchronize();
}

}  // namespace lockstep::testing::simulated

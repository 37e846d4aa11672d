#pragma once

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/wire/thread_engine.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// Counts what the ranks of a test over pretended hosts send to other hosts, but for control.
class WireMeter {
 public:
  struct Sent {
    size_t messages;
    size_t bytes;
  };

  /// `hosts`: by rank, on which it is.
  explicit WireMeter(std::vector<int> hosts) : hosts_(std::move(hosts)), all_(std::ssize(hosts_)) {}

  void on_ranks(const std::function<void(transport::GroupChannel&)>& body) {
    const auto hub = transport::wire::ThreadHub::make(static_cast<int>(hosts_.size()));
    transport::HostTransport::Options options;
    options.host_of = hosts_;
    for (size_t host = 0; host < hosts_.size(); ++host) {
      options.host_names.push_back("host-" + std::to_string(host));
    }
    options.make_engine = [&](int rank) {
      return std::make_unique<CountingEngine>(hub->make_engine(rank), *this);
    };
    testing::run_rank_threads(
        static_cast<int>(hosts_.size()),
        [&](const std::shared_ptr<transport::GroupChannel>& channel) { body(*channel); }, options);
  }

  /// What all ranks send together in `operation`. Called by each of them; the answer is the same for all.
  Sent measure(const std::function<void()>& operation) {
    all_.arrive_and_wait();
    const Sent before = sent();
    all_.arrive_and_wait();
    operation();
    all_.arrive_and_wait();
    return {messages_ - before.messages, bytes_ - before.bytes};
  }

 private:
  class CountingEngine final : public transport::wire::Engine {
   public:
    CountingEngine(std::unique_ptr<Engine> engine, WireMeter& meter)
        : meter_(meter), engine_(std::move(engine)) {
      engine_->on_done = [this](transport::wire::Operation& operation) {
        if (on_done) on_done(operation);
      };
      engine_->on_peer_lost = [this](int rank, const std::string& reason) {
        if (on_peer_lost) on_peer_lost(rank, reason);
      };
    }
    std::string describe() const override { return engine_->describe(); }
    std::string address() const override { return engine_->address(); }
    void connect(int rank, const std::string& address) override { engine_->connect(rank, address); }
    void send(transport::wire::Operation& operation, transport::wire::Tag tag, const void* data,
              size_t bytes) override {
      if (tag.channel != 0) {
        meter_.messages_ += 1;
        meter_.bytes_ += bytes;
      }
      engine_->send(operation, tag, data, bytes);
    }
    void receive(transport::wire::Operation& operation, transport::wire::Tag tag, void* data,
                 size_t bytes) override {
      engine_->receive(operation, tag, data, bytes);
    }
    void cancel(transport::wire::Operation& operation) override { engine_->cancel(operation); }
    void abandon(int rank, const std::string& reason) override { engine_->abandon(rank, reason); }
    bool progress() override { return engine_->progress(); }
    bool arm() override { return engine_->arm(); }
    int event_fd() const override { return engine_->event_fd(); }

   private:
    WireMeter& meter_;
    const std::unique_ptr<Engine> engine_;
  };

  Sent sent() const { return {messages_, bytes_}; }

  const std::vector<int> hosts_;
  std::barrier<> all_;
  std::atomic<size_t> messages_{0};
  std::atomic<size_t> bytes_{0};
};

}  // namespace lockstep::collectives::internal::algorithms::hosts

#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

namespace rendezvous_internal {
class CallThread;
}

/// Another store, for use when its host may be lost or cut off: then a TCPStore waits until the kernel gives the
/// connection up, which may take a quarter of an hour.
///
/// The calls run in a thread of the store's own, one after the other. One that has no answer within `patience`, or fails, throws
/// c10::DistStoreError, and all calls after it do so at once. An Interruption ends the wait for an answer. The calls
/// that wait for keys wait no longer than `patience`. Thread-safe.
class BoundedStore final : public c10d::Store {
 public:
  BoundedStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::nanoseconds patience);
  ~BoundedStore() override;

  /// Why the store is out of reach, once a call has failed.
  std::optional<std::string> lost() const;

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  template <class Call>
  auto ask(Call call);
  [[noreturn]] void fail(std::string reason);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::nanoseconds patience_;
  const std::unique_ptr<rendezvous_internal::CallThread> caller_;
  mutable std::mutex mutex_;
  std::optional<std::string> lost_;
};

}  // namespace lockstep

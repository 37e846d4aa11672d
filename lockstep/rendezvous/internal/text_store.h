#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/rendezvous/internal/call_thread.h>
#include <lockstep/rendezvous/internal/unbounded_store.h>

namespace lockstep::rendezvous_internal {

/// What a call of a TextStore may take beyond its deadline.
constexpr auto kStoreGrace = std::chrono::seconds(2);

/// A store as it is used while ranks meet: it holds texts and numbers, and its calls end. Where those of the store itself
/// may never return, one that has no answer by the deadline, or after kStoreGrace where that is later, throws
/// c10::DistStoreError, and all after it do so at once. Otherwise what the store throws is thrown. Used by one thread.
class TextStore {
 public:
  /// `describe_silence`: says why there is no answer, unless the store's file does.
  TextStore(c10d::Store& store, Deadline deadline, std::function<std::string()> describe_silence)
      : store_(store),
        unbounded_(as_unbounded(store)),
        deadline_(deadline),
        describe_silence_(std::move(describe_silence)) {}

  /// Whether a call had no answer.
  bool lost() const { return lost_; }

  bool check(const std::string& key);
  std::string get(const std::string& key);
  std::vector<std::string> get_all(const std::vector<std::string>& keys);
  void set(const std::string& key, const std::string& value);
  /// Sets the key, unless it is there already. What it holds then.
  std::string set_first(const std::string& key, const std::string& value);
  void remove(const std::string& key);
  int64_t add(const std::string& key, int64_t amount);
  /// What was added up under the key, which is there.
  int64_t number(const std::string& key);

 private:
  template <class Call>
  auto ask(Call call);

  c10d::Store& store_;
  const UnboundedStore unbounded_;  // the same, where calls may never return
  const Deadline deadline_;
  const std::function<std::string()> describe_silence_;
  std::unique_ptr<CallThread> caller_;  // for the latter
  bool lost_ = false;
};

}  // namespace lockstep::rendezvous_internal

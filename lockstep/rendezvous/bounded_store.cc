#include <functional>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/rendezvous/bounded_store.h>
#include <lockstep/rendezvous/internal/call_by.h>
#include <lockstep/rendezvous/internal/call_thread.h>

namespace lockstep {

BoundedStore::BoundedStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::nanoseconds patience)
    : store_(std::move(store)),
      patience_(patience),
      caller_(std::make_unique<rendezvous_internal::CallThread>()) {}

BoundedStore::~BoundedStore() = default;

std::optional<std::string> BoundedStore::lost() const {
  std::lock_guard lock(mutex_);
  return lost_;
}

void BoundedStore::fail(std::string reason) {
  {
    std::lock_guard lock(mutex_);
    if (!lost_) lost_ = std::move(reason);
    reason = *lost_;
  }
  C10_THROW_ERROR(DistStoreError, "the job's store can't be reached: " + reason);
}

template <class Call>
auto BoundedStore::ask(Call call) {
  if (auto reason = lost()) fail(*std::move(reason));
  try {
    auto answer = rendezvous_internal::call_by(
        Deadline::after(patience_), [call = std::move(call), store = store_] { return call(*store); },
        /*interruptible=*/true, [this](std::function<void()> body) { caller_->start(std::move(body)); });
    if (answer) return *std::move(answer);
  } catch (const Interruption&) {
    throw;
  } catch (const c10::Error& error) {
    fail(text_of(error));
  }
  fail("no answer within " + format_duration(patience_));
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
  return c10::make_intrusive<BoundedStore>(store_->clone(), patience_);
}

void BoundedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask([=](c10d::Store& store) {
    store.set(key, value);
    return true;
  });
}

std::vector<uint8_t> BoundedStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                              const std::vector<uint8_t>& desired) {
  return ask([=](c10d::Store& store) { return store.compareSet(key, expected, desired); });
}

std::vector<uint8_t> BoundedStore::get(const std::string& key) {
  return ask([=](c10d::Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
  return ask([=](c10d::Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
  return ask([=](c10d::Store& store) { return store.deleteKey(key); });
}

bool BoundedStore::check(const std::vector<std::string>& keys) {
  return ask([=](c10d::Store& store) { return store.check(keys); });
}

int64_t BoundedStore::getNumKeys() {
  return ask([](c10d::Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, std::chrono::ceil<std::chrono::milliseconds>(patience_));
}

void BoundedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  ask([=](c10d::Store& store) {
    store.wait(keys, timeout);
    return true;
  });
}

std::vector<std::vector<uint8_t>> BoundedStore::multiGet(const std::vector<std::string>& keys) {
  return ask([=](c10d::Store& store) { return store.multiGet(keys); });
}

}  // namespace lockstep

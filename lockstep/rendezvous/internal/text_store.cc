#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/rendezvous/internal/call_by.h>
#include <lockstep/rendezvous/internal/file_store.h>
#include <lockstep/rendezvous/internal/text_store.h>

namespace lockstep::rendezvous_internal {
namespace {

std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

[[noreturn]] void throw_no_number(const std::string& key) {
  C10_THROW_ERROR(DistStoreError, c10::str("the store holds no number under '", key,
                                           "', which no rank of this job wrote; do not write there, and do "
                                           "not use a store again that another program left behind"));
}

}  // namespace

/// The store's answer to `call`, which owns what it uses.
template <class Call>
auto TextStore::ask(Call call) {
  if (!unbounded_.store) return call(store_);
  const auto patience =
      Deadline::after(std::max<std::chrono::nanoseconds>(deadline_.remaining(), kStoreGrace));
  std::optional<std::invoke_result_t<Call&, c10d::Store&>> answer;
  if (!lost_) {
    if (!caller_) caller_ = std::make_unique<CallThread>();
    answer = call_by(
        patience, [call, store = unbounded_.store]() mutable { return call(*store); },
        /*interruptible=*/true, [this](std::function<void()> body) { caller_->start(std::move(body)); });
  }
  lost_ = !answer;
  if (lost_) {
    C10_THROW_ERROR(DistStoreError,
                    unbounded_.file.empty() ? describe_silence_() : describe_unreadable(unbounded_.file));
  }
  return std::move(*answer);
}

bool TextStore::check(const std::string& key) {
  return ask([=](c10d::Store& store) { return store.check({key}); });
}

std::string TextStore::get(const std::string& key) {
  return to_text(ask([=](c10d::Store& store) { return store.get(key); }));
}

std::vector<std::string> TextStore::get_all(const std::vector<std::string>& keys) {
  std::vector<std::string> all;
  for (const auto& bytes : ask([=](c10d::Store& store) { return store.multiGet(keys); })) {
    all.push_back(to_text(bytes));
  }
  return all;
}

void TextStore::set(const std::string& key, const std::string& value) {
  ask([=](c10d::Store& store) {
    store.set(key, to_bytes(value));
    return true;
  });
}

std::string TextStore::set_first(const std::string& key, const std::string& value) {
  return to_text(ask([=](c10d::Store& store) { return store.compareSet(key, {}, to_bytes(value)); }));
}

void TextStore::remove(const std::string& key) {
  ask([=](c10d::Store& store) { return store.deleteKey(key); });
}

// Store::add parses what is there, and says no more than "stoll" when that is no number.
int64_t TextStore::add(const std::string& key, int64_t amount) {
  try {
    return ask([=](c10d::Store& store) { return store.add(key, amount); });
  } catch (const std::logic_error&) {
    throw_no_number(key);
  }
}

// add(key, 0) would tell it too, but a FileStore then takes an exclusive lock and appends a record.
int64_t TextStore::number(const std::string& key) {
  const auto number = parse_number<int64_t>(get(key));
  if (!number) throw_no_number(key);
  return *number;
}

}  // namespace lockstep::rendezvous_internal

#include <algorithm>
#include <thread>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/doctor/internal/report_board.h>
#include <lockstep/rendezvous/bounded_store.h>

/// Under doctor/ in the store, for round N:
///   N/report/R   what rank R has to say
///   N/all        what rank 0 makes of it: an array of texts, of true for a rank that has ended and false for
///                one that is silent; or its own text
///   N/seen/R     rank R has read N/all
namespace lockstep::doctor::internal {
namespace {

using std::chrono::microseconds;

/// What rank 0 gets beyond the deadline to publish.
constexpr std::chrono::seconds kMargin{2};
constexpr std::chrono::seconds kLinger{3};

std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

ReportBoard::ReportBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                         std::chrono::nanoseconds store_patience)
    : store_(c10::make_intrusive<c10d::PrefixStore>(
          "doctor", c10::make_intrusive<BoundedStore>(std::move(store), store_patience))),
      rank_(rank),
      states_(static_cast<size_t>(world_size), State::kPresent) {}

std::string ReportBoard::key(const char* kind, int rank) const {
  return std::to_string(round_) + "/" + kind + (rank < 0 ? "" : "/" + std::to_string(rank));
}

bool ReportBoard::is_there(const std::string& key) const {
  return store_->check({key});
}

/// Polls, for a wait inside of the store would hold its client's lock.
bool ReportBoard::wait_for(const std::string& key, int rank, const Deadline& deadline) const {
  constexpr microseconds kLongest{5000};
  for (microseconds pause{100};; pause = std::min(pause * 2, kLongest)) {
    // In this order: what a rank published before its end counts.
    const bool given_up = has_ended(rank) || deadline.expired();
    if (is_there(key)) return true;
    if (given_up) return false;
    std::this_thread::sleep_for(pause);
  }
}

std::string ReportBoard::await_rank_0(const Deadline& deadline) const {
  if (!wait_for(key("all", -1), 0, Deadline::after(deadline.remaining() + kMargin))) {
    LOCKSTEP_THROW_TIMEOUT(std::string("rank 0, which collects the results, ") +
                           (has_ended(0) ? "has ended" : "does not answer") +
                           "; see what it wrote, and start the job again without it");
  }
  const auto bytes = store_->get(key("all", -1));
  return {bytes.begin(), bytes.end()};
}

ReportBoard::Reports ReportBoard::gather(const std::string& mine, const Deadline& deadline) {
  ++round_;
  store_->set(key("report", rank_), to_bytes(mine));
  const auto size = static_cast<int>(states_.size());
  if (rank_ == 0) {
    auto all = nlohmann::json::array();
    for (int rank = 0; rank < size; ++rank) {
      if (is_missing(rank)) {
        all.push_back(state(rank) == State::kEnded);
      } else if (wait_for(key("report", rank), rank, deadline)) {
        const auto bytes = store_->get(key("report", rank));
        all.push_back(std::string(bytes.begin(), bytes.end()));
      } else {
        all.push_back(has_ended(rank));
      }
    }
    store_->set(key("all", -1), to_bytes(json_text(all)));
  }
  const auto all = nlohmann::json::parse(await_rank_0(deadline), nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_WITH(DistStoreError, all.is_array() && all.size() == states_.size(),
                   "the store holds reports that rank 0 did not write; do not write to the job's store");
  Reports reports(states_.size());
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const auto& entry = all.at(rank);
    if (entry.is_string()) reports[rank] = entry.get<std::string>();
    states_[rank] = entry.is_string() ? State::kPresent : entry == true ? State::kEnded : State::kSilent;
  }
  if (is_missing(rank_)) {
    LOCKSTEP_THROW_TIMEOUT("rank " + std::to_string(rank_) +
                           " did not answer in time, and the others went on without it");
  }
  return reports;
}

std::string ReportBoard::share(const std::string& from_rank_0, const Deadline& deadline) {
  ++round_;
  if (rank_ != 0) {
    const std::string text = await_rank_0(deadline);
    store_->set(key("seen", rank_), to_bytes("1"));
    return text;
  }
  store_->set(key("all", -1), to_bytes(from_rank_0));
  const Deadline linger = Deadline::after(kLinger);
  for (int rank = 1; rank < static_cast<int>(states_.size()); ++rank) {
    if (!is_missing(rank)) wait_for(key("seen", rank), rank, linger);
  }
  return from_rank_0;
}

}  // namespace lockstep::doctor::internal

// Any bytes as a rank's file: an error or a record that can be written again, and analysed, without harm.
#include <cstdlib>
#include <string_view>

#include <c10/util/Exception.h>

#include <lockstep/flight/analysis.h>
#include <lockstep/flight/records.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::flight::flight_records_fuzz {
namespace {

std::vector<std::string> seeds() {
  RankRecord record;
  record.rank = 1;
  record.world_size = 3;
  record.host = "host-1";
  record.reason = "timeout";
  record.monotonic_ns = 5'000'000'000;
  record.realtime_ns = 1'700'000'005'000'000'000;
  record.loaded_ns = 1'700'000'000'000'000'000;
  record.groups = {{"", "the default group", {0, 1, 2}}, {"1", "pair", {1, 2}}};
  const std::string empty = to_json(record);
  Entry entry;
  entry.record_id = 7;
  entry.operation = "all_reduce";
  entry.detail = "SUM";
  entry.sequence = 2;
  entry.inputs = entry.outputs = {{{2, 3}}, {"Float"}};
  entry.state = State::kCompleted;
  entry.created_ns = 1'000'000'000;
  entry.started_ns = 1'000'000'100;
  entry.ended_ns = 2'000'000'000;
  entry.file = "train.cc";
  entry.line = 12;
  record.entries.push_back(entry);
  entry.record_id = 8;
  entry.sequence = 3;
  entry.state = State::kStarted;
  entry.ended_ns = 0;
  record.entries.push_back(entry);
  entry.record_id = 9;
  entry.group = 1;
  entry.operation = "send";
  entry.point_to_point = true;
  entry.peer = 1;
  entry.tag = 5;
  record.entries.push_back(entry);
  return {empty, to_json(record)};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(flight_records, seeds) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  RankRecord record;
  try {
    record = parse(text, "input");
  } catch (const c10::ValueError&) {
    return 0;
  }
  const std::string written = to_json(record);
  if (to_json(parse(written, "written")) != written) std::abort();
  RankRecord other = record;
  other.rank = record.rank == 0 ? record.world_size - 1 : 0;
  std::vector<RankRecord> records = {record};
  if (other.rank != record.rank) records.push_back(std::move(other));
  describe(analyze(std::move(records)));
  return 0;
}

}  // namespace lockstep::flight::flight_records_fuzz

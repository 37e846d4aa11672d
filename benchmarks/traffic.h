#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/flight/records.h>

#include "command_loop.h"

/// How many bytes a piece of a program hands to collectives, by what the flight recorder has seen of it.
namespace lockstep::benchmarks {

/// Of this rank, in bytes.
struct Traffic {
  int64_t inputs = 0;   ///< handed to collectives, for the others
  int64_t outputs = 0;  ///< received from them; as much as the inputs where a collective works in place
};

/// Of an element, by the recorder's word for its type ("Float").
inline int64_t element_size(const std::string& dtype) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    if (type != c10::ScalarType::Undefined && dtype == c10::toString(type)) {
      return static_cast<int64_t>(c10::elementSize(type));
    }
  }
  TORCH_CHECK(false, "the flight recorder names a type '", dtype, "', which torch does not know");
}

inline int64_t bytes_of(const flight::Tensors& tensors) {
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.sizes.size(); ++i) {
    int64_t tensor = element_size(tensors.dtypes[i]);
    for (const int64_t size : tensors.sizes[i]) tensor *= size;
    bytes += tensor;
  }
  return bytes;
}

/// The record of all that happened until now.
inline flight::RankRecord current_record() {
  const int64_t now = wall_clock();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (true) {
    const std::string path = flight::dump("benchmark");
    TORCH_CHECK(!path.empty(), "there is no flight record, by which the traffic is counted; is it off ",
                "(LOCKSTEP_FLIGHT_RECORDS), or can its folder not be written (LOCKSTEP_FLIGHT_DIR)?");
    // The recorder does not write as often as it is asked to: this may be an older record.
    auto record = flight::read_file(path);
    if (record.monotonic_ns >= now) return record;
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, path, " does not get newer");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

/// What `work` hands to collectives. All ranks call it; `work` passes no barrier.
inline Traffic count_traffic(const std::function<void()>& work) {
  lockstep::barrier();
  work();
  lockstep::barrier();
  const auto record = current_record();
  Traffic traffic;
  int barriers = 0;
  for (auto entry = record.entries.rbegin(); entry != record.entries.rend() && barriers < 2; ++entry) {
    if (entry->operation == "barrier") {
      ++barriers;
    } else if (barriers == 1) {
      traffic.inputs += bytes_of(entry->inputs);
      traffic.outputs += bytes_of(entry->outputs);
    }
  }
  TORCH_CHECK(barriers == 2, "the flight recorder kept only ", record.entries.size(),
              " operations, fewer than these steps have; raise LOCKSTEP_FLIGHT_RECORDS, or do fewer steps");
  return traffic;
}

}  // namespace lockstep::benchmarks

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <lockstep/profiler/internal/operation_log.h>
#include <lockstep/profiler/internal/thread_scopes.h>

/// What we add to the file that Kineto has written.
namespace lockstep::profiler::internal {

struct TraceAdditions {
  std::map<std::string, std::string> metadata;  // JSON, by key; beside Kineto's own
  OperationLog::Content operations;
  std::vector<ThreadScope> scopes;
  std::unordered_map<uint64_t, std::string>
      stacks;                  // of operators, by FunctionEvent::id; with ';' between calls
  std::string collectives_as;  // "lockstep"
};

/// `from`: Kineto's file, which is read once, from begin to end. `to` appears as a whole; it is compressed if its name ends
/// with .gz. Throws c10::Error that names the file that can't be read or written, or is none of Kineto's.
void write_trace(const std::string& from, const std::string& to, const TraceAdditions& additions);

}  // namespace lockstep::profiler::internal

#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>

/// How a rank under measurement talks to the benchmarks' driver.
///
/// Each rank has a pair of named pipes of its own, RANK.commands and RANK.answers, in the folder that
/// LOCKSTEP_BENCH_CHANNEL names. So a rank with nothing to do sleeps in read(2), never in a collective, and
/// does not disturb what is being measured elsewhere. A command is one line, `OPERATION ARGUMENT ITERATIONS
/// WARMUP`; the answer is one line of JSON. The end of the pipe (the driver is gone) and `quit` end the rank.
/// benchmarks/peers speak the same in Python and C.
namespace lockstep::benchmarks {

inline constexpr const char* kChannel = "LOCKSTEP_BENCH_CHANNEL";

/// One thing to measure. Every rank of a job gets the same one, unless it is a thing that one rank does
/// alone.
struct Command {
  std::string operation;
  std::string argument;    ///< a size in bytes, or a network's name: the operation knows
  int64_t iterations = 0;  ///< that are timed
  int64_t warmup = 0;      ///< that come before
};

/// What this rank saw, in nanoseconds.
struct Timings {
  std::vector<int64_t> wall;            ///< one entry per timed iteration
  std::vector<int64_t> cpu;             ///< of all threads of the process: one per iteration, or their mean;
                                        ///< empty where it is not measured
  std::map<std::string, double> facts;  ///< what else is known about these iterations, by name
};

/// Throws c10::ValueError for a line that is no command.
inline Command parse_command(const std::string& line) {
  Command command;
  std::istringstream words(line);
  std::string more;
  const bool complete = static_cast<bool>(words >> command.operation >> command.argument >>
                                          command.iterations >> command.warmup);
  TORCH_CHECK_VALUE(complete && !(words >> more) && command.iterations > 0 && command.warmup >= 0, "'", line,
                    "' is not a benchmark command; do: OPERATION ARGUMENT ITERATIONS WARMUP");
  return command;
}

inline std::string to_json(const Timings& timings) {
  std::ostringstream json;
  json.precision(std::numeric_limits<double>::max_digits10);
  const auto list = [&](const char* name, const std::vector<int64_t>& values) {
    json << '"' << name << "\": [";
    for (size_t i = 0; i < values.size(); ++i) json << (i == 0 ? "" : ", ") << values[i];
    json << ']';
  };
  json << '{';
  list("wall", timings.wall);
  json << ", ";
  list("cpu", timings.cpu);
  json << ", \"facts\": {";
  for (const char* separator = ""; const auto& [name, value] : timings.facts) {
    json << separator << '"' << name << "\": " << value;
    separator = ", ";
  }
  json << "}}";
  return json.str();
}

/// Now, for how long something took.
inline int64_t wall_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Processor time, user and system, that all threads of this process have used.
inline int64_t cpu_clock() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

/// Runs the driver's commands until it is done; or, started by hand, the one on the command line. Returns
/// main()'s status. Whatever `measure` throws is the caller's.
inline int serve(int argc, char** argv, int rank, const std::function<Timings(const Command&)>& measure) {
  if (argc > 1) {
    std::string line;
    for (int i = 1; i < argc; ++i) line += std::string(i == 1 ? "" : " ") + argv[i];
    std::cout << "rank " + std::to_string(rank) + ": " + to_json(measure(parse_command(line))) + "\n"
              << std::flush;
    return 0;
  }
  const auto channel = environment::text(kChannel);
  TORCH_CHECK(
      channel,
      "nothing to measure; do: scripts/bench, or give one command: OPERATION ARGUMENT ITERATIONS WARMUP");
  const std::string pipe = *channel + "/" + std::to_string(rank);
  std::ifstream commands(pipe + ".commands");
  std::ofstream answers(pipe + ".answers");
  TORCH_CHECK(commands && answers, "cannot open ", pipe, ".commands and .answers, which the driver makes");
  answers << "{\"ready\": true}" << std::endl;
  for (std::string line; std::getline(commands, line) && line != "quit";) {
    answers << to_json(measure(parse_command(line))) << std::endl;
  }
  return 0;
}

/// main() of a program under measurement: what `body` returns; or 1, with the text of what it threw on
/// standard error, without the backtrace.
inline int run(const std::function<int()>& body) try { return body(); } catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}

}  // namespace lockstep::benchmarks

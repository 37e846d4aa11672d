// Runs fuzz targets.
//
// The inputs run in a child process. Each is put into memory that the parent shares before the target sees
// it: however the child ends (a signal, a sanitizer's _exit, the out-of-memory killer, the parent's own kill
// when an input takes too long), the parent has the input and writes it to a file.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <new>
#include <optional>
#include <random>
#include <sstream>
#include <string_view>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <lockstep/base/text/parse_number.h>
#include <lockstep/testing/fuzz_driver.h>
#include <lockstep/testing/fuzz_mutator.h>

// GCC defines the macros, clang answers __has_feature.
#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define LOCKSTEP_ADDRESS_SANITIZER 1
#else
#define LOCKSTEP_ADDRESS_SANITIZER 0
#endif
#if LOCKSTEP_ADDRESS_SANITIZER || defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define LOCKSTEP_SANITIZED 1
#else
#define LOCKSTEP_SANITIZED 0
#endif

#if LOCKSTEP_ADDRESS_SANITIZER
// A sanitizer's shadow memory is beyond any RLIMIT_AS; this bounds single allocations instead.
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=1024:detect_leaks=0";
}
#endif

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage = R"(usage: %s [options] [FILE | DIRECTORY]...

Runs the fuzz target on its own seeds and on the files of each DIRECTORY, then on random mutations of them. An input
that ends or stops the process is saved, with the command that runs it again. With FILEs alone: runs these and ends.

  --runs N          mutations to run; 0: no limit (0)
  --seconds T       time to spend; 0: no limit (60, or 0 if --runs is given)
  --seed S          of the mutations (random; it is printed, and the same seed gives the same inputs)
  --max-length N    bytes of the longest input (4096)
  --memory MIB      what the target may use; not with sanitizers, which bound single allocations to 1 GiB (1024)
  --timeout T       seconds that one input may take (60)
  --artifacts DIR   where to save the input that failed (.)
  --test            as a test: 2000 runs of seed 1; if LOCKSTEP_TEST_ALL is set, 60 seconds of a random seed
  --help            this text

Exit status: 0 nothing found, 1 an input failed, 2 misuse.
)";

struct Options {
  uint64_t runs = 0;
  std::optional<uint64_t> seconds;
  std::optional<uint64_t> seed;
  uint64_t max_length = 4096;
  uint64_t memory_mib = 1024;
  uint64_t timeout = 60;
  bool test = false;
  std::string artifacts = ".";
  std::vector<std::string> paths;
};

[[noreturn]] void misuse(const std::string& what) {
  std::cerr << what << "; see --help" << std::endl;
  std::exit(2);
}

uint64_t number_of(const std::string& option, std::string_view text) {
  const auto value = parse_number<uint64_t>(text);
  if (!value || *value > uint64_t{1} << 40) {
    misuse(option + " is '" + std::string(text) + "'; it takes a whole number");
  }
  return *value;
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&]() -> std::string_view {
      if (++i == argc) misuse(word + " needs a value");
      return argv[i];
    };
    if (word == "--help" || word == "-h") {
      std::printf(kUsage, fs::path(argv[0]).filename().c_str());
      std::exit(0);
    }
    if (word == "--runs")
      options.runs = number_of(word, value());
    else if (word == "--seconds")
      options.seconds = number_of(word, value());
    else if (word == "--seed")
      options.seed = number_of(word, value());
    else if (word == "--max-length")
      options.max_length = std::max<uint64_t>(number_of(word, value()), 1);
    else if (word == "--memory")
      options.memory_mib = number_of(word, value());
    else if (word == "--timeout")
      options.timeout = std::max<uint64_t>(number_of(word, value()), 1);
    else if (word == "--artifacts")
      options.artifacts = value();
    else if (word == "--test")
      options.test = true;
    else if (word.starts_with("-"))
      misuse("unknown option '" + word + "'");
    else
      options.paths.push_back(word);
  }
  if (options.test) {
    const char* all = std::getenv("LOCKSTEP_TEST_ALL");
    const bool longer = all != nullptr && *all != '\0';
    options.runs = longer ? 0 : 2000;
    options.seconds = longer ? 60 : 0;
    if (!longer) options.seed = 1;
  }
  if (!options.seed) options.seed = std::random_device()();
  if (!options.seconds) options.seconds = options.runs > 0 ? 0 : 60;
  return options;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) misuse(path.string() + " cannot be read: " + std::strerror(errno));
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes << std::flush;
  if (!file) misuse(path.string() + " cannot be written: " + std::strerror(errno));
}

/// FNV-1a, in hexadecimal: the same input is saved under the same name.
std::string name_of(std::string_view bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (unsigned char c : bytes) value = (value ^ c) * 0x100000001b3;
  std::ostringstream text;
  text << std::hex << value;
  return text.str();
}

/// The target's seeds and the directories' files, in an order that depends on nothing else.
std::vector<std::string> read_corpus(const FuzzTarget& target, const Options& options) {
  auto corpus = target.seeds();
  for (const auto& path : options.paths) {
    if (!fs::is_directory(path)) {
      corpus.push_back(read_file(path));
      continue;
    }
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const auto& file : files) corpus.push_back(read_file(file));
  }
  corpus.emplace_back();
  return corpus;
}

/// Runs the target on a copy of exact size, so that AddressSanitizer sees what reads beyond its end.
/// An exception ends the process by a signal, as it does in a program without a driver's main().
void run_target(const FuzzTarget& target, const std::string& input) noexcept {
  const std::vector<uint8_t> copy(input.begin(), input.end());
  target.run(copy.data(), copy.size());
}

/// What parent and child share; the input's bytes follow.
struct Shared {
  std::atomic<uint64_t> inputs{0};  // that were begun
  std::atomic<uint64_t> size{0};
  std::atomic<bool> finished{false};  // all inputs were run: a target that calls exit(0) has not got there
  char* bytes() { return reinterpret_cast<char*>(this + 1); }
  std::string input() { return {bytes(), size.load()}; }
};

Shared& share(size_t bytes) {
  void* memory =
      ::mmap(nullptr, sizeof(Shared) + bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) misuse(std::string("mmap failed: ") + std::strerror(errno));
  return *new (memory) Shared();
}

/// Lets this process grow by so much beyond what the loaded libraries occupy.
void limit_memory(uint64_t mib) {
  const rlimit no_core{0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  if (LOCKSTEP_SANITIZED) return;
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) + (mib << 20);
  const rlimit limit{bytes, bytes};
  ::setrlimit(RLIMIT_AS, &limit);
}

/// The child: every input of the corpus, then mutations until the runs or the time are used up.
void run_inputs(const FuzzTarget& target, const Options& options, const std::vector<std::string>& corpus,
                Shared& shared) {
  const auto run = [&](const std::string& input) {
    std::copy(input.begin(), input.end(), shared.bytes());
    shared.size = input.size();
    ++shared.inputs;
    run_target(target, input);
  };
  for (const auto& input : corpus) run(input);
  FuzzMutator mutator(*options.seed, options.max_length);
  const auto end = Clock::now() + std::chrono::seconds(*options.seconds);
  for (uint64_t i = 0; options.runs == 0 || i < options.runs; ++i) {
    if (*options.seconds != 0 && Clock::now() >= end) return;
    const auto& base = corpus[mutator.below(corpus.size())];
    run(mutator.mutate(base, corpus[mutator.below(corpus.size())]));
  }
}

/// Waits for the child; kills it when one input takes longer than the timeout. Returns the wait status.
int watch(pid_t child, Shared& shared, std::chrono::seconds timeout, bool& hung) {
  uint64_t seen = 0;
  auto since = Clock::now();
  while (true) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    if (const uint64_t inputs = shared.inputs; inputs != seen) {
      seen = inputs;
      since = Clock::now();
    } else if (Clock::now() - since > timeout) {
      hung = true;
      ::kill(child, SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

std::string describe(int status, bool hung, uint64_t timeout) {
  if (hung) return "took longer than " + std::to_string(timeout) + " s";
  if (WIFSIGNALED(status)) {
    return std::string("ended the process by signal ") + std::to_string(WTERMSIG(status)) + " (" +
           ::strsignal(WTERMSIG(status)) + ")";
  }
  return "ended the process with status " + std::to_string(WEXITSTATUS(status));
}

void report(const Options& options, const fs::path& program, const std::string& input,
            const std::string& what) {
  fs::create_directories(options.artifacts);
  const auto path =
      fs::absolute(fs::path(options.artifacts) / (program.filename().string() + "-" + name_of(input)));
  write_file(path.lexically_normal(), input);
  std::cerr << "\n"
            << program.filename().string() << ": an input of " << input.size() << " bytes " << what
            << "\n  run it again: " << fs::absolute(program).lexically_normal().string() << " "
            << path.lexically_normal().string() << "\n";
  // So that a log is enough where the file is lost.
  if (input.size() <= 1024) {
    std::ostringstream hex;
    for (unsigned char c : input) hex << std::hex << (c >> 4) << (c & 15);
    std::cerr << "  its bytes (xxd -r -p): " << hex.str() << "\n";
  }
  std::cerr << std::flush;
}

int fuzz(const FuzzTarget& target, const Options& options, const fs::path& program) {
  const auto corpus = read_corpus(target, options);
  size_t longest = options.max_length;
  for (const auto& input : corpus) longest = std::max(longest, input.size());
  Shared& shared = share(longest);
  std::cout << program.filename().string() << ": seed " << *options.seed << ", " << corpus.size()
            << " inputs to start from" << std::endl;
  const auto begin = Clock::now();
  const pid_t child = ::fork();
  if (child < 0) misuse(std::string("fork failed: ") + std::strerror(errno));
  if (child == 0) {
    limit_memory(options.memory_mib);
    run_inputs(target, options, corpus, shared);
    shared.finished = true;
    std::fflush(nullptr);
    ::_exit(0);
  }
  bool hung = false;
  const int status = watch(child, shared, std::chrono::seconds(options.timeout), hung);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
  if (status != 0 || !shared.finished) {
    report(options, program, shared.input(), describe(status, hung, options.timeout));
    return 1;
  }
  std::cout << program.filename().string() << ": " << shared.inputs << " inputs, none failed, in "
            << took.count() << " ms" << std::endl;
  return 0;
}

}  // namespace

int run_fuzz_driver(const FuzzTarget& target, int argc, char** argv) {
  const Options options = parse_options(argc, argv);
  for (const auto& path : options.paths) {
    if (!fs::exists(path)) misuse(path + " does not exist");
  }
  const bool only_files =
      !options.paths.empty() && std::none_of(options.paths.begin(), options.paths.end(),
                                             [](const auto& path) { return fs::is_directory(path); });
  if (!only_files) return fuzz(target, options, argv[0]);
  // Here and in no child, so that a debugger sees it.
  limit_memory(options.memory_mib);
  for (const auto& path : options.paths) {
    std::cout << "running " << path << std::endl;
    run_target(target, read_file(path));
  }
  return 0;
}

}  // namespace lockstep::testing

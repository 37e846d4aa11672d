#include <chrono>
#include <cstddef>
#include <sched.h>

#include <lockstep/base/process/cpu.h>

namespace lockstep {

namespace {

constexpr size_t kWordBits = 8 * sizeof(unsigned long);

/// Of the memory of a CoreMask, which has the layout of a cpu_set_t.
cpu_set_t* as_set(const std::vector<unsigned long>& words) {
  return reinterpret_cast<cpu_set_t*>(const_cast<unsigned long*>(words.data()));
}

}  // namespace

CoreMask::CoreMask(const std::vector<int>& cores) {
  for (const int core : cores) {
    const size_t word = static_cast<size_t>(core) / kWordBits;
    if (words_.size() <= word) words_.resize(word + 1);
    words_[word] |= 1UL << (static_cast<size_t>(core) % kWordBits);
  }
}

CoreMask CoreMask::current() {
  CoreMask mask({});
  // A mask that is too small for the machine is refused.
  for (size_t possible = CPU_SETSIZE; possible <= (1 << 20); possible *= 2) {
    mask.words_.assign(possible / kWordBits, 0);
    if (::sched_getaffinity(0, possible / 8, as_set(mask.words_)) == 0) return mask;
  }
  return CoreMask({0});
}

std::vector<int> CoreMask::cores() const {
  std::vector<int> cores;
  for (size_t core = 0; core < words_.size() * kWordBits; ++core) {
    if ((words_[core / kWordBits] >> (core % kWordBits) & 1) != 0) cores.push_back(static_cast<int>(core));
  }
  return cores;
}

bool CoreMask::apply(pid_t thread) const {
  return ::sched_setaffinity(thread, words_.size() * sizeof(unsigned long), as_set(words_)) == 0;
}

int usable_cores() {
  return static_cast<int>(CoreMask::current().cores().size());
}

int current_cpu() {
  const int cpu = ::sched_getcpu();
  return cpu < 0 ? 0 : cpu;
}

void move_to_another_cpu() {
  constexpr auto kPause = std::chrono::milliseconds(100);
  using Clock = std::chrono::steady_clock;
  thread_local Clock::time_point next{};
  const auto now = Clock::now();
  if (now < next) return;
  next = now + kPause;
  cpu_set_t mask;  // on machines with more than 1024 CPUs this fails, and nothing is done
  if (::sched_getaffinity(0, sizeof mask, &mask) != 0 || CPU_COUNT(&mask) < 2) return;
  cpu_set_t others = mask;
  CPU_CLR(current_cpu(), &others);
  if (::sched_setaffinity(0, sizeof others, &others) == 0) ::sched_setaffinity(0, sizeof mask, &mask);
}

}  // namespace lockstep

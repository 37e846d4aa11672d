#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include <c10/util/Exception.h>

#include <lockstep/base/text/lower_case.h>
#include <lockstep/bench/internal/plan.h>

namespace lockstep::bench::internal {
namespace {

constexpr int64_t kDefaultMinBytes = int64_t{1} << 10;
constexpr int64_t kDefaultMaxBytes = int64_t{16} << 20;
constexpr int64_t kMostBytes = int64_t{1} << 50;  // far beyond any machine, and sums of it don't overflow
constexpr int64_t kMostIterations = 10'000'000;
// Left to all other programs, as check_memory_available() does.
constexpr int64_t kMemoryReserve = int64_t{64} << 20;

struct NamedType {
  const char* name;
  const char* alias;
  c10::ScalarType type;
};
constexpr std::array<NamedType, 9> kTypes = {{{"float", "float32", c10::ScalarType::Float},
                                              {"double", "float64", c10::ScalarType::Double},
                                              {"half", "float16", c10::ScalarType::Half},
                                              {"bfloat16", "bf16", c10::ScalarType::BFloat16},
                                              {"int8", "char", c10::ScalarType::Char},
                                              {"uint8", "byte", c10::ScalarType::Byte},
                                              {"int16", "short", c10::ScalarType::Short},
                                              {"int32", "int", c10::ScalarType::Int},
                                              {"int64", "long", c10::ScalarType::Long}}};

struct NamedOp {
  const char* name;
  const char* alias;
  RedOpType op;
};
constexpr std::array<NamedOp, 8> kOps = {{{"sum", "sum", RedOpType::SUM},
                                          {"prod", "product", RedOpType::PRODUCT},
                                          {"min", "min", RedOpType::MIN},
                                          {"max", "max", RedOpType::MAX},
                                          {"avg", "avg", RedOpType::AVG},
                                          {"band", "band", RedOpType::BAND},
                                          {"bor", "bor", RedOpType::BOR},
                                          {"bxor", "bxor", RedOpType::BXOR}}};

/// The entry of that name or alias, in any case; `what` is the option for the error.
template <class Table>
const auto& find_named(const Table& table, const std::string& text, const char* what) {
  std::string known;
  for (const auto& entry : table) {
    if (lower_case(text) == entry.name || lower_case(text) == entry.alias) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  TORCH_CHECK_VALUE(false, what, " is '", text, "'; known are ", known);
}

/// The powers of 1024 in a size's suffix; -1 for something else.
int exponent_of(std::string suffix) {
  if (suffix.ends_with("ib") && suffix.size() == 3) {
    suffix.resize(1);
  } else if (suffix.ends_with('b') && suffix.size() <= 2) {
    suffix.pop_back();
  }
  if (suffix.empty()) return 0;
  const size_t found = std::string_view("kmgt").find(suffix);
  return suffix.size() == 1 && found != std::string_view::npos ? static_cast<int>(found) + 1 : -1;
}

void set_sizes(const BenchOptions& options, Plan& plan) {
  plan.min_bytes =
      options.min_bytes.value_or(std::min(kDefaultMinBytes, options.max_bytes.value_or(kMostBytes)));
  plan.max_bytes = options.max_bytes.value_or(std::max(kDefaultMaxBytes, plan.min_bytes));
  TORCH_CHECK_VALUE(plan.min_bytes >= 1, "--begin is ", plan.min_bytes, "; it takes at least 1 byte");
  TORCH_CHECK_VALUE(plan.max_bytes <= kMostBytes, "--end is ", plan.max_bytes, " bytes; at most ", kMostBytes,
                    " make sense");
  TORCH_CHECK_VALUE(plan.min_bytes <= plan.max_bytes, "--begin (", format_bytes(plan.min_bytes),
                    ") is larger than --end (", format_bytes(plan.max_bytes),
                    "); swap them, or leave one out");
  TORCH_CHECK_VALUE(options.step_factor >= 2, "--factor is ", options.step_factor,
                    "; it takes at least 2. For a single size give the same --begin and --end");
  plan.step_factor = options.step_factor;
}

/// Elements of a part for each size: whole ones, at least one, none twice.
std::vector<int64_t> counts_for(const CollectiveInfo& info, const Plan& plan) {
  if (info.collective == Collective::kBarrier) return {0};
  const int64_t unit = static_cast<int64_t>(c10::elementSize(plan.dtype)) * (info.split ? plan.ranks : 1);
  std::vector<int64_t> counts;
  for (int64_t bytes = plan.min_bytes; bytes <= plan.max_bytes; bytes *= plan.step_factor) {
    const int64_t count = std::max<int64_t>(1, bytes / unit);
    if (counts.empty() || counts.back() != count) counts.push_back(count);
    if (bytes > plan.max_bytes / plan.step_factor) break;  // the next would be beyond, or overflow
  }
  return counts;
}

/// Why the collective can't run as asked for, or nothing.
std::optional<std::string> objection_to(const CollectiveInfo& info, const BenchOptions& options,
                                        const Plan& plan) {
  const std::string name = info.name;
  if (plan.ranks < info.min_ranks) {
    return name + " needs at least " + std::to_string(info.min_ranks) + " ranks, and there is " +
           std::to_string(plan.ranks) + "; start more with --nproc-per-node";
  }
  if (info.collective == Collective::kBarrier) return std::nullopt;  // has no data to be in place
  if (!(options.in_place && info.in_place) && !(options.out_of_place && info.out_of_place)) {
    return name + " works " +
           (info.in_place ? "in place only; leave out --out-of-place"
                          : "out of place only; leave out --in-place");
  }
  return std::nullopt;
}

void check_operation(const Plan& plan) {
  const bool reduces =
      std::any_of(plan.steps.begin(), plan.steps.end(), [](const Step& step) { return step.info->reduces; });
  if (!reduces) return;
  const bool bitwise = plan.op == RedOpType::BAND || plan.op == RedOpType::BOR || plan.op == RedOpType::BXOR;
  const bool floating = c10::isFloatingType(plan.dtype);
  TORCH_CHECK_VALUE(!(floating && bitwise), "--op ", plan.op_name, " works on integers, not on --dtype ",
                    plan.dtype_name, "; take int32, or another operation");
}

Step make_step(const CollectiveInfo& info, const BenchOptions& options, const Plan& plan) {
  Step step{&info, counts_for(info, plan), {}};
  const bool barrier = info.collective == Collective::kBarrier;
  if (info.out_of_place && (options.out_of_place || barrier))
    step.placements.push_back(Placement::kOutOfPlace);
  if (info.in_place && options.in_place) step.placements.push_back(Placement::kInPlace);
  return step;
}

void add_steps(const BenchOptions& options, Plan& plan) {
  const auto& names = options.collectives;
  if (names.empty() || (names.size() == 1 && names.front() == "all")) {
    for (const CollectiveInfo& info : all_collectives()) {
      if (!objection_to(info, options, plan)) plan.steps.push_back(make_step(info, options, plan));
    }
    return;
  }
  for (const std::string& name : names) {
    const CollectiveInfo& info = find_collective(name);
    const auto objection = objection_to(info, options, plan);
    TORCH_CHECK_VALUE(!objection, *objection);
    const bool twice = std::any_of(plan.steps.begin(), plan.steps.end(),
                                   [&](const Step& step) { return step.info == &info; });
    if (!twice) plan.steps.push_back(make_step(info, options, plan));
  }
}

}  // namespace

int64_t Plan::memory_bytes() const {
  return (buffers.first + buffers.second) * static_cast<int64_t>(c10::elementSize(dtype)) * ranks;
}

Plan make_plan(const BenchOptions& options, int ranks) {
  TORCH_CHECK_VALUE(options.iterations >= 1 && options.iterations <= kMostIterations, "--iters is ",
                    options.iterations, "; it takes 1 to ", kMostIterations);
  TORCH_CHECK_VALUE(options.warmup >= 0 && options.warmup <= kMostIterations, "--warmup is ", options.warmup,
                    "; it takes 0 to ", kMostIterations);
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "--timeout is ", options.timeout.count(),
                    " ms; it must be more than 0");
  TORCH_CHECK_VALUE(
      options.root >= 0 && options.root < ranks, "--root is ", options.root, "; with ", ranks,
      ranks == 1 ? " rank it can only be 0" : " ranks it lies in 0 to " + std::to_string(ranks - 1));
  Plan plan;
  plan.ranks = ranks;
  const NamedType& type = find_named(kTypes, options.dtype, "--dtype");
  plan.dtype = type.type;
  plan.dtype_name = type.name;
  const NamedOp& op = find_named(kOps, options.reduce_op, "--op");
  plan.op = op.op;
  plan.op_name = op.name;
  plan.root = options.root;
  plan.iterations = options.iterations;
  plan.warmup = options.warmup;
  plan.memory = options.memory;
  set_sizes(options, plan);
  add_steps(options, plan);
  check_operation(plan);
  for (const Step& step : plan.steps) {
    for (const Placement placement : step.placements) {
      const BufferElements needed = buffer_elements(*step.info, placement, step.counts.back(), ranks);
      plan.buffers.first = std::max(plan.buffers.first, needed.first);
      plan.buffers.second = std::max(plan.buffers.second, needed.second);
    }
  }
  return plan;
}

std::optional<std::string> memory_objection(const Plan& plan, const MemoryLimits& limits) {
  const int64_t room = std::min(limits.available, limits.cgroup_left);
  if (plan.memory_bytes() <= room - kMemoryReserve) return std::nullopt;
  const bool by_cgroup = limits.cgroup_left < limits.available;
  return "the buffers of " + std::to_string(plan.ranks) + " ranks need " + format_bytes(plan.memory_bytes()) +
         " of memory, but only " + format_bytes(room) + " are left (" +
         (by_cgroup ? "the control group's limit" : "MemAvailable") + "); choose a smaller --end than " +
         format_bytes(plan.max_bytes) + " or fewer ranks";
}

int64_t shown_bytes(const CollectiveInfo& info, int64_t count, int ranks, c10::ScalarType dtype) {
  return count * (info.split ? ranks : 1) * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace lockstep::bench::internal

namespace lockstep::bench {

int64_t parse_size(const std::string& text, const std::string& option) {
  int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const int exponent = internal::exponent_of(lower_case(std::string(stop, text.data() + text.size())));
  TORCH_CHECK_VALUE(error == std::errc() && exponent >= 0, option, " is '", text,
                    "'; it takes a number of bytes such as 4096, 4K or 100M");
  TORCH_CHECK_VALUE(number >= 1, option, " is '", text, "'; it takes at least 1 byte");
  TORCH_CHECK_VALUE(number <= internal::kMostBytes >> (10 * exponent), option, " is '", text, "'; at most ",
                    format_bytes(internal::kMostBytes), " make sense");
  return number << (10 * exponent);
}

}  // namespace lockstep::bench

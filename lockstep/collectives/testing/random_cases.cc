#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>
#include <sstream>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <lockstep/base/environment.h>
#include <lockstep/collectives/testing/random_cases.h>

namespace lockstep::testing {
namespace {

constexpr std::array kTypes = {at::kFloat, at::kDouble, at::kBFloat16,     at::kHalf,
                               at::kChar,  at::kByte,   at::kShort,        at::kInt,
                               at::kLong,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
constexpr std::array kReductions = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT,
                                    ReduceOp::MIN, ReduceOp::MAX,  ReduceOp::BAND,
                                    ReduceOp::BOR, ReduceOp::BXOR, ReduceOp::PREMUL_SUM};
constexpr std::array kReductionNames = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                        "BAND", "BOR", "BXOR",    "PREMUL_SUM"};

/// Around the borders between the paths: nothing, one element, the 8 KiB of an announcement, several chunks.
std::vector<int64_t> random_sizes(Random& random) {
  static const std::vector<std::vector<int64_t>> kSizes = {
      {},      {0},    {1},    {7},       {3, 5},       {2, 0, 3},     {61, 43},
      {2048},  {2049}, {5003}, {9, 1031}, {2, 3, 4, 5}, {3, 5, 9, 13}, {1, 3, 1, 2, 5, 1, 2},
      {1, 64}, {20011}};
  return kSizes[static_cast<size_t>(draw(random, 0, static_cast<int64_t>(kSizes.size()) - 1))];
}

/// The rows that each pair of ranks exchanges; some none.
std::vector<std::vector<int64_t>> random_rows(Random& random, int ranks, bool even) {
  const int64_t most = draw(random, 0, 2) == 0 ? 300 : 5;
  const int64_t equal = draw(random, 0, most);
  std::vector<std::vector<int64_t>> rows(static_cast<size_t>(ranks));
  for (auto& from : rows) {
    for (int to = 0; to < ranks; ++to) {
      from.push_back(even ? equal : std::max<int64_t>(0, draw(random, -most / 2, most)));
    }
  }
  return rows;
}

/// Then each host's sum is rounded on its own (algorithms/hosts/hosts.h), averages of float16 after their
/// division. Only where nothing needs rounding does one process compute the same.
bool over_hosts() {
  static const bool are_several = environment::integer("LOCKSTEP_TEST_HOSTS", 1, 64).value_or(1) > 1;
  return are_several;
}

void draw_type_and_reduction(Random& random, Case& c) {
  do {
    c.dtype = kTypes[static_cast<size_t>(draw(random, 0, kTypes.size() - 1))];
    c.reduction = c.operation->traits.reduces
                      ? kReductions[static_cast<size_t>(draw(random, 0, kReductions.size() - 1))]
                      : ReduceOp::SUM;
    if (c.operation->traits.sparse) c.reduction = ReduceOp::SUM;
    // torch can't add sparse tensors of these.
    if (c.operation->traits.sparse && (c.dtype == at::kBool || c.dtype == at::kHalf)) c.dtype = at::kFloat;
  } while (!is_reducible(c.dtype, c.reduction));
  // Products with the factor may be rounded before they are added or not: both are right.
  c.rounds = draw(random, 0, 1) == 0 && c.reduction != ReduceOp::PREMUL_SUM && !c.operation->traits.sparse;
  if (!over_hosts()) return;
  c.rounds = false;
  if (c.dtype == at::kHalf && c.reduction == ReduceOp::AVG) c.reduction = ReduceOp::SUM;
}

at::Tensor random_reals(const Case& c, at::Generator& generator, std::vector<int64_t> sizes,
                        at::ScalarType type) {
  if (type == at::kBool) return at::randint(2, sizes, generator, at::kBool);
  if (c.rounds && c10::isFloatingType(type)) return at::randn(sizes, generator, at::kFloat).to(type);
  const int64_t low = c10::isSignedType(type) ? -4 : 0;
  return at::randint(low, 5, sizes, generator, at::kLong).to(type);
}

at::Tensor fold_two(ReduceOp::RedOpType reduction, const at::Tensor& left, const at::Tensor& right) {
  const bool logical = left.scalar_type() == at::kBool;
  switch (reduction) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      return logical ? left.logical_or(right) : left + right;
    case ReduceOp::PRODUCT:
      return logical ? left.logical_and(right) : left * right;
    case ReduceOp::MIN:
      return at::minimum(left, right);
    case ReduceOp::MAX:
      return at::maximum(left, right);
    case ReduceOp::BAND:
      return left.bitwise_and(right);
    case ReduceOp::BOR:
      return left.bitwise_or(right);
    default:
      return left.bitwise_xor(right);
  }
}

}  // namespace

bool is_reducible(at::ScalarType dtype, ReduceOp::RedOpType reduction) {
  const bool averages = reduction == ReduceOp::AVG || reduction == ReduceOp::PREMUL_SUM;
  const bool bits = reduction == ReduceOp::BAND || reduction == ReduceOp::BOR || reduction == ReduceOp::BXOR;
  if (c10::isComplexType(dtype)) return averages || reduction == ReduceOp::SUM;
  if (c10::isFloatingType(dtype)) return !bits;
  return !averages || (reduction == ReduceOp::AVG && dtype != at::kBool);
}

double premul_factor(const Case& c, int rank) {
  constexpr std::array kFactors = {0.5, 2.0, -1.0, 4.0, 1.0};  // exact in every type
  return kFactors[(c.seed + static_cast<uint64_t>(rank)) % kFactors.size()];
}

at::Tensor contribution(const Case& c, int rank, int64_t index, at::IntArrayRef sizes) {
  std::seed_seq sequence{static_cast<uint32_t>(c.seed), static_cast<uint32_t>(c.seed >> 32),
                         static_cast<uint32_t>(rank), static_cast<uint32_t>(index)};
  std::array<uint32_t, 2> words{};
  sequence.generate(words.begin(), words.end());
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{words[0]} << 32 | words[1]);
  if (!c10::isComplexType(c.dtype)) return random_reals(c, generator, sizes.vec(), c.dtype);
  std::vector<int64_t> pairs = sizes.vec();
  pairs.push_back(2);
  return at::view_as_complex(random_reals(c, generator, pairs, c10::toRealValueType(c.dtype)));
}

std::vector<at::Tensor> contributions(const Case& c, int64_t index, at::IntArrayRef sizes) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < c.ranks; ++rank) all.push_back(contribution(c, rank, index, sizes));
  return all;
}

at::Tensor fold(const Case& c, std::vector<at::Tensor> tensors) {
  const bool complex = c10::isComplexType(c.dtype);
  at::Tensor result;
  for (size_t rank = 0; rank < tensors.size(); ++rank) {
    at::Tensor next = complex ? at::view_as_real(tensors[rank]) : tensors[rank];
    if (c10::isReducedFloatingType(c.dtype)) next = next.to(at::kFloat);
    if (c.reduction == ReduceOp::PREMUL_SUM) next = next * premul_factor(c, static_cast<int>(rank));
    result = rank == 0 ? next.clone() : fold_two(c.reduction, result, next);
  }
  if (c.reduction == ReduceOp::AVG && c10::isIntegralType(c.dtype, /*includeBool=*/false)) {
    result = at::div(result, c.ranks, "trunc");
  } else if (c.reduction == ReduceOp::AVG) {
    result = result / static_cast<double>(c.ranks);
  }
  return complex ? at::view_as_complex(result) : result.to(c.dtype);
}

Case random_case(Random& random, const Operation& operation, int ranks) {
  Case c;
  c.operation = &operation;
  c.seed = random();
  c.ranks = ranks;
  draw_type_and_reduction(random, c);
  const int64_t parts = operation.traits.coalesced ? draw(random, 1, 4) : 1;
  for (int64_t part = 0; part < parts; ++part) c.parts.push_back(random_sizes(random));
  c.stacked = draw(random, 0, 1) == 0;
  c.even = draw(random, 0, 2) == 0;
  c.rows = random_rows(random, ranks, c.even);
  c.root = static_cast<int>(draw(random, 0, ranks - 1));
  c.peer = ranks == 1 ? 0 : static_cast<int>((c.root + draw(random, 1, ranks - 1)) % ranks);
  c.any_source = draw(random, 0, 2) == 0;
  // A rank that receives from any source must not get a message that another call meant for it.
  c.tag = c.any_source ? static_cast<int>(draw(random, 1000, 2'000'000'000))
                       : static_cast<int>(draw(random, 0, 2));
  c.asynchronous = draw(random, 0, 1) == 0;
  return c;
}

std::string Case::describe() const {
  const auto& traits = operation->traits;
  std::ostringstream text;
  text << operation->name << " of";
  if (traits.tensors) {
    text << ' ' << dtype;
    for (const auto& sizes : parts) text << ' ' << at::IntArrayRef(sizes);
    if (rounds) text << " with rounding";
  }
  if (traits.reduces) text << ", " << kReductionNames[reduction];
  if (traits.rooted) text << ", root " << root;
  if (traits.splits) {
    text << (even ? ", even rows" : ", rows");
    for (const auto& from : rows) text << ' ' << at::IntArrayRef(from);
  }
  if (traits.point_to_point) {
    text << ", " << root << " to " << peer << ", tag " << tag << (any_source ? ", from any source" : "");
  }
  text << ", " << ranks << " ranks" << (stacked ? ", stacked" : "") << (asynchronous ? ", asynchronous" : "")
       << ", data seed " << seed;
  return text.str();
}

uint64_t test_seed() {
  static const uint64_t seed = [] {
    if (auto given = environment::integer("LOCKSTEP_TEST_SEED", 0)) return static_cast<uint64_t>(*given);
    return long_run() ? uint64_t{std::random_device{}()} : 1;
  }();
  return seed;
}

std::vector<std::pair<std::string, std::optional<std::string>>> seed_environment(uint64_t seed) {
  return {{"LOCKSTEP_TEST_SEED", std::to_string(seed)}};
}

}  // namespace lockstep::testing

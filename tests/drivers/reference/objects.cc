// The examples of docs/reference/objects.md.
#include <map>
#include <string>

#include <lockstep/lockstep.h>

#include "examples.h"

// [ObjectConversion]
struct Progress {
  int64_t epoch;
  double loss;
};

template <>
struct lockstep::ObjectConversion<Progress> {
  static c10::IValue to(const Progress& value) { return to_object(std::pair(value.epoch, value.loss)); }
  static Progress from(const c10::IValue& object) {
    const auto [epoch, loss] = from_object<std::pair<int64_t, double>>(object);
    return {epoch, loss};
  }
};
// [end]

namespace reference {
namespace {

using lockstep::from_object;
using lockstep::to_object;

void object_conversion() {
  const auto progress = from_object<Progress>(to_object(Progress{3, 0.25}));
  expect(progress.epoch == 3 && progress.loss == 0.25);
}

void conversions() {
  // [to_object]
  using Counters = std::map<std::string, double>;
  c10::IValue object = lockstep::to_object(Counters{{"loss", 0.5}, {"num_samples", 3}});
  c10::IValue name = lockstep::to_object("worker");
  // [end]
  // [from_object]
  auto counters = lockstep::from_object<std::map<std::string, double>>(object);  // counters["loss"] is 0.5
  // [end]
  expect(counters["loss"] == 0.5 && counters["num_samples"] == 3 && name.toStringRef() == "worker");
}

void all_gather_object(int rank) {
  // [all_gather_object]
  std::vector<c10::IValue> objects(4);
  lockstep::all_gather_object(objects, to_object("rank " + std::to_string(rank)));
  auto last = from_object<std::string>(objects[3]);  // "rank 3"
  // [end]
  expect(last == "rank 3");
}

void all_gather_values(int rank) {
  // [all_gather_values]
  const std::vector<std::string> names = lockstep::all_gather_values("rank " + std::to_string(rank));
  TORCH_CHECK(names[3] == "rank 3");
  // [end]
}

void gather_object(int rank) {
  // [gather_object]
  std::vector<c10::IValue> objects(4);
  lockstep::gather_object(to_object(rank), rank == 0 ? &objects : nullptr, /*dst=*/0);
  if (rank == 0) TORCH_CHECK(from_object<int>(objects[2]) == 2);
  // [end]
}

void broadcast_object_list(int rank) {
  // [broadcast_object_list]
  std::vector<c10::IValue> objects(2);
  if (rank == 0) objects = {to_object("adam"), to_object(std::vector<double>{0.9, 0.999})};
  lockstep::broadcast_object_list(objects, /*src=*/0);
  auto betas = from_object<std::vector<double>>(objects[1]);  // on all ranks
  // [end]
  expect(betas == std::vector<double>{0.9, 0.999} && from_object<std::string>(objects[0]) == "adam");
}

void scatter_object_list(int rank) {
  // [scatter_object_list]
  std::vector<c10::IValue> mine(1), all;
  if (rank == 0) all = {to_object("a"), to_object("b"), to_object("c"), to_object("d")};
  lockstep::scatter_object_list(mine, all, /*src=*/0);  // rank 1: "b"
  // [end]
  expect(from_object<std::string>(mine[0]) == std::string(1, static_cast<char>('a' + rank)));
}

void send_object_list(int rank) {
  // [send_object_list]
  if (rank == 0) lockstep::send_object_list({to_object("seed"), to_object(42)}, /*dst=*/1);
  // [end]
  // [recv_object_list]
  std::vector<c10::IValue> objects(2);  // as many as are sent
  if (rank == 1) lockstep::recv_object_list(objects, /*src=*/0);
  // [end]
  if (rank == 1) expect(from_object<std::string>(objects[0]) == "seed" && from_object<int>(objects[1]) == 42);
}

}  // namespace

void objects(int rank) {
  object_conversion();
  conversions();
  all_gather_object(rank);
  all_gather_values(rank);
  gather_object(rank);
  broadcast_object_list(rank);
  scatter_object_list(rank);
  send_object_list(rank);
}

}  // namespace reference

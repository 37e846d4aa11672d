#include <cstdint>
#include <gmock/gmock.h>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// parity/device_mesh_parity_test.py compares groups, slices and coordinates with PyTorch's.
namespace lockstep::device_mesh_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::sum_of_ranks;

TEST(DeviceMesh, NeedsADefaultGroup) {
  EXPECT_THAT(message_of<c10::ValueError>([] { init_device_mesh("cpu", {1}); }),
              HasSubstr("please make sure to call init_process_group"));
}

TEST(DeviceMesh, GroupsOfTheLastDimensionAreNeighbours) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh.get_group("tp")->getGroupDesc(), "mesh_tp");
    EXPECT_EQ(sum_of_ranks(mesh.get_group("tp")), rank < 2 ? 1 : 5);
    EXPECT_EQ(sum_of_ranks(mesh.get_group(0)), rank % 2 == 0 ? 2 : 4);
    EXPECT_EQ(mesh["dp"].get_local_rank(), rank / 2);
    EXPECT_EQ(sum_of_ranks(mesh.flatten().get_group()), 6);
  });
}

// Ranks 0 and 2 are on one host, as mpirun --map-by node counts them.
TEST(DeviceMesh, TheLastDimensionStaysWithinAHost) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  run_ranks(4, [](int rank) {
    ::setenv("LOCKSTEP_TEST_HOST", rank % 2 == 0 ? "host-a" : "host-b", 1);
    auto world = init_process_group();
    const auto topology = get_topology();
    EXPECT_THAT(topology.neighbours(), ElementsAre(rank % 2, rank % 2 + 2));
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    EXPECT_THAT(get_process_group_ranks(mesh.get_group("tp")), ElementsAre(rank % 2, rank % 2 + 2));
    EXPECT_FALSE(get_topology(mesh.get_group("tp")).spans_hosts());
    EXPECT_TRUE(get_topology(mesh.get_group("dp")).spans_hosts());
    EXPECT_EQ(sum_of_ranks(mesh.get_group("dp")), rank < 2 ? 1 : 5);
  });
}

TEST(DeviceMesh, RanksOutsideOfItHaveNoGroups) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto mesh = init_device_mesh("cpu", {2}, {"dp"});
    EXPECT_EQ(is_member(mesh.get_group()), rank < 2);
    EXPECT_EQ(mesh.get_local_rank(), rank < 2 ? rank : -1);
    EXPECT_EQ(mesh.get_coordinate().has_value(), rank < 2);
    EXPECT_EQ(mesh.mesh().size(0), 2);
    const auto other = DeviceMesh("cpu", at::tensor({2}));
    EXPECT_EQ(is_member(other.get_group()), rank == 2);
  });
}

TEST(DeviceMesh, CopiesAndSlicesShareTheirGroups) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const auto mesh = init_device_mesh("cpu", {2, 1}, {"dp", "tp"});
    const int groups = get_pg_count();
    const DeviceMesh copy = mesh;
    EXPECT_EQ(copy, mesh);
    EXPECT_EQ(copy["dp"].get_group(), mesh.get_group("dp"));
    EXPECT_EQ(mesh.get_group("dp"), default_group()) << "it has all ranks";
    const auto flat = mesh.flatten("all");
    EXPECT_EQ(copy.flatten("all").get_group(), flat.get_group());
    EXPECT_EQ(copy["all"], flat);
    EXPECT_EQ(get_pg_count(), groups) << "slices and dimensions of all ranks make none";
    EXPECT_NE(mesh["dp"], mesh["tp"]);
  });
}

TEST(DeviceMesh, MisuseIsAnErrorOnAllRanks) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const auto says = [](const std::function<void()>& action) { return message_of<c10::Error>(action); };
    EXPECT_THAT(says([] {
                  init_device_mesh("cpu", {2, 2});
                }),
                HasSubstr("default world size 2, but found 4 ranks"));
    EXPECT_THAT(says([] { init_device_mesh("cpu", std::vector<int64_t>(64, 2)); }),
                HasSubstr("default world size 2, but found 4 ranks"));
    EXPECT_THAT(says([] {
                  DeviceMesh("cpu", at::tensor({int64_t{0}, (int64_t{1} << 32) + 1}));
                }),
                HasSubstr("has rank 4294967297"));
    EXPECT_THAT(says([] { init_device_mesh("cpu", {2, 1}, {"a", "a"}); }), HasSubstr("must be unique"));
    EXPECT_THAT(says([] { init_device_mesh("cpu", {2, 1}, {"a"}); }), HasSubstr("should have same length"));
    EXPECT_THAT(says([] { init_device_mesh("cuda:0", {2}); }), HasSubstr("with index is not supported"));
    EXPECT_THAT(says([] { init_device_mesh("cpu", {0}); }), HasSubstr("has no ranks"));
    EXPECT_THAT(says([] {
                  DeviceMesh("cpu", at::tensor({0, 0}));
                }),
                HasSubstr("rank 0 stands more than once"));
    EXPECT_THAT(says([] { DeviceMesh("cpu", at::tensor({0, 2})); }), HasSubstr("has rank 2"));
    const auto unnamed = init_device_mesh("cpu", {2, 1});
    EXPECT_THAT(says([&] { unnamed["dp"]; }), HasSubstr("Cannot slice a DeviceMesh without mesh_dim_names"));
    EXPECT_THAT(says([&] { unnamed.flatten(); }), HasSubstr("Cannot flatten"));
    EXPECT_THAT(says([&] { unnamed.get_group(); }), HasSubstr("needs to be specified"));
    EXPECT_THAT(message_of<c10::IndexError>([&] { unnamed.get_group(2); }), HasSubstr("out of range"));
    const auto mesh = init_device_mesh("cpu", {2, 1}, {"dp", "tp"});
    EXPECT_THAT(
        message_of<c10::IndexError>([&] { mesh["pp"]; }),
        HasSubstr("Invalid mesh_dim_names ('pp',) specified. Valid mesh_dim_names are ['dp', 'tp']."));
    EXPECT_THAT(message_of<c10::IndexError>([&] { mesh.get_group("pp"); }), HasSubstr("does not exist"));
    EXPECT_THAT(message_of<c10::ValueError>([&] { mesh.flatten("dp"); }), HasSubstr("already exists"));
    mesh["dp"].flatten("x");
    EXPECT_THAT(message_of<c10::ValueError>([&] { mesh["tp"].flatten("x"); }),
                HasSubstr("has been created before"));
  });
}

}  // namespace
}  // namespace lockstep::device_mesh_test

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/backend/arena_allocation.h>

namespace lockstep::arena_allocation_test {
namespace {

std::shared_ptr<transport::Arena> make_arena() {
  return std::make_shared<transport::Arena>(size_t{1} << 20, 0);
}

bool lies_in(const transport::Arena& arena, const at::Tensor& tensor) {
  return arena.find(tensor.const_data_ptr(), tensor.nbytes()).has_value();
}

TEST(ArenaAllocator, PlacesThisThreadsTensorsOnly) {
  const auto arena = make_arena();
  at::Tensor in, elsewhere;
  {
    const ArenaAllocation allocation(arena);
    in = at::ones({100});
    std::thread([&] { elsewhere = at::ones({100}); }).join();
    EXPECT_EQ(allocation.bytes(), 400);
  }
  const at::Tensor after = at::ones({100});
  EXPECT_TRUE(lies_in(*arena, in));
  EXPECT_FALSE(lies_in(*arena, elsewhere));
  EXPECT_FALSE(lies_in(*arena, after));
  EXPECT_EQ(in.sum().item<float>(), 100);
}

TEST(ArenaAllocator, GivesTheMemoryBack) {
  const auto arena = make_arena();
  {
    const ArenaAllocation allocation(arena);
    for (int i = 0; i < 100; ++i) at::ones({100'000});  // far more in all than there is
    EXPECT_GT(arena->bytes_in_use() + 1, 0u);
  }
  EXPECT_EQ(arena->bytes_in_use(), 0);
}

TEST(ArenaAllocator, TensorsMayOutliveEverything) {
  at::Tensor tensor;
  std::weak_ptr<transport::Arena> watched;
  {
    const auto arena = make_arena();
    watched = arena;
    const ArenaAllocation allocation(arena);
    tensor = at::arange(1000);
  }
  EXPECT_FALSE(watched.expired());
  EXPECT_EQ(tensor[999].item<int64_t>(), 999);
  tensor.resize_({100'000});  // moves to ordinary memory
  EXPECT_EQ(tensor[999].item<int64_t>(), 999);
  EXPECT_TRUE(watched.expired());
}

TEST(ArenaAllocator, RawMemoryIsFreedByItsAddress) {
  const auto arena = make_arena();
  c10::Allocator* allocator = nullptr;
  void* shared = nullptr;
  {
    const ArenaAllocation allocation(arena);
    allocator = c10::GetCPUAllocator();
    shared = allocator->raw_allocate(1000);
  }
  void* ordinary = allocator->raw_allocate(1000);
  EXPECT_TRUE(arena->find(shared, 1000));
  EXPECT_FALSE(arena->find(ordinary, 1000));
  allocator->raw_deallocate(ordinary);
  allocator->raw_deallocate(shared);
  EXPECT_EQ(arena->bytes_in_use(), 0);
}

TEST(ArenaAllocator, TheInnermostCounts) {
  const auto outer_arena = make_arena();
  const auto inner_arena = make_arena();
  const ArenaAllocation outer(outer_arena);
  at::Tensor inside;
  {
    const ArenaAllocation inner(inner_arena);
    inside = at::ones({100});
  }
  const at::Tensor after = at::ones({100});
  EXPECT_TRUE(lies_in(*inner_arena, inside));
  EXPECT_TRUE(lies_in(*outer_arena, after));
}

TEST(ArenaAllocator, AForkedChildLeavesTheParentsMemoryAlone) {
  const auto arena = make_arena();
  at::Tensor tensor;
  void* raw = nullptr;
  {
    const ArenaAllocation allocation(arena);
    tensor = at::ones({100});
    raw = c10::GetCPUAllocator()->raw_allocate(100);
  }
  const size_t before = arena->bytes_in_use();
  const pid_t child = ::fork();
  if (child == 0) {
    tensor = at::Tensor();
    c10::GetCPUAllocator()->raw_deallocate(raw);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(arena->bytes_in_use(), before);
  EXPECT_EQ(tensor.sum().item<float>(), 100);
  c10::GetCPUAllocator()->raw_deallocate(raw);
}

}  // namespace
}  // namespace lockstep::arena_allocation_test

"""The figures that the project promises, on two cores."""

import statistics
from dataclasses import dataclass

from benchmarks.driver.suites import collectives

# Over all cells with plain tensors; told only when the suite ran that measures all of them.
OVER_CELLS = {"cells.least": min, "cells.median": statistics.median}


@dataclass(frozen=True)
class Target:
    figure: str
    bound: float
    what: str
    at_most: bool = False  # else at least
    percent: bool = False  # shown as what the ratio adds to 1

    def is_met(self, value):
        return value <= self.bound if self.at_most else value >= self.bound

    def show(self, value):
        return f"{100 * (value - 1):.1f} %" if self.percent else f"{value:.3g}x"


# Training steps. That DDP is faster than no communication is possible where malloc's pages weigh more: its gradients have
# theirs for good.
STEP_TARGETS = (
    Target("step.2.large.cpp_ddp.over_baseline", 1.04, "large network, DDP adds to the better baseline", True, True),
    Target("step.2.large.cpp_keep_ddp.over_baseline", 1.04, "the same, malloc keeps its pages", True, True),
    Target("step.2.small.cpp_ddp.over_baseline", 1.10, "small network, DDP adds to the better baseline", True, True),
    Target("step.2.small.cpp_keep_ddp.over_baseline", 1.10, "the same, malloc keeps its pages", True, True),
    Target("step.2.large.cpp_ddp.over_default", 1, "large network, DDP adds to the baseline of the same malloc", True, True),
    Target("step.2.huge.cpp_ddp.over_default", 1, "huge network, DDP adds to the baseline of the same malloc", True, True),
    Target("step.2.small.cpp_ddp.vs_python", 3, "small network, faster than Python DDP with Gloo"),
    Target("step.2.large.cpp_ddp.vs_python", 1.3, "large network, faster than Python DDP with Gloo"),
    *(Target(f"step.{cell}_ddp.vs_{python}", 1, f"{words}, not slower than Python DDP with Gloo") for cell, python, words in (
        ("2.small.cpp_keep", "python_keep", "small network, malloc keeps its pages"),
        ("2.large.cpp_keep", "python_keep", "large network, malloc keeps its pages"),
        ("2.huge.cpp", "python", "huge network"),
        ("4.small.cpp", "python", "small network, 4 ranks"),
        ("4.large.cpp", "python", "large network, 4 ranks"),
        ("4.huge.cpp", "python", "huge network, 4 ranks"))),
    # Where both choose the same, they differ by noise alone: 2 %.
    *(Target(f"tuning.2.{network}.cpp_ddp.vs_fixed", 0.98, f"{network} network, chosen bucket sizes against 25 MiB")
      for network in ("small", "large", "huge")),
)

# Over network namespaces on this machine.
HOST_TARGETS = (
    *(Target(f"hosts.1gbit.{layout}.25MiB.{figure}", bound, f"1 Gbit/s, {layout}, all_reduce 25 MiB{words}")
      for layout, figure, bound, words in (
        ("2x2", "vs_gloo", 1.4, ", faster than Gloo"), ("2x2", "bf16_vs_gloo", 2.3, " by bf16, faster than Gloo"),
        ("2x2", "int8_vs_gloo", 3.7, " by int8, faster than Gloo"), ("2x1", "vs_gloo", 0.95, ", within 5 % of Gloo"),
        ("4x2", "vs_gloo", 1.3, ", faster than Gloo"), ("1+3", "vs_gloo", 1, ", not slower than Gloo"),
        ("2+1", "vs_gloo", 1, ", not slower than Gloo"),
        *((layout, "vs_mpi", 1.4, ", faster than Open MPI") for layout in ("2x2", "2x1", "4x2", "1+3", "2+1")))),
    Target("hosts.unshaped.2x1.25MiB.vs_gloo", 1, "unshaped wire, 2x1, all_reduce 25 MiB, not slower than Gloo"),
    Target("hosts.unshaped.2x2.25MiB.vs_gloo", 1.5, "unshaped wire, 2x2, all_reduce 25 MiB, faster than Gloo"),
    Target("hosts.1gbit.2x2.4KiB.vs_gloo", 20, "1 Gbit/s, 2x2, all_reduce 4 KiB, faster than Gloo"),
    Target("hosts.1gbit.2x2.barrier.vs_gloo", 20, "1 Gbit/s, 2x2, barrier, faster than Gloo"),
    *(Target(f"hosts_cpu.1gbit.{layout}.of_slices", 1.5, f"1 Gbit/s, {layout}, processor time, of one Gloo group a slice",
             at_most=True) for layout in ("2x2", "4x2")),
    Target("hosts_step.1gbit.2x2.large.vs_python", 1.4, "1 Gbit/s, 2x2, step of the large network, than Python DDP with Gloo"),
    Target("hosts_step.1gbit.2x2.large.int8_vs_python", 2, "the same by int8"),
    Target("hosts_scaling.1gbit.8.lockstep.efficiency", 0.9, "1 Gbit/s, 8 ranks on 4 hosts, efficiency (a simulation)"),
)

SHARDING_TARGETS = tuple(
    target for network in ("transformer_25m", "huge") for target in (
        *(Target(f"sharding.{ranks}.{network}.fsdp.{figure}", bound, f"FSDP of {network}, {ranks} ranks, {words}")
          for ranks in (2, 4) for figure, bound, words in (
            ("vs_python", 2.5, "faster than Python's fully_shard with Gloo"), ("vs_ddp", 0.95, "against our DDP"))),
        Target(f"sharding_memory.2.{network}.fsdp.of_python", 1.05, f"FSDP of {network}, memory, of fully_shard's", at_most=True),
        Target(f"sharding_memory.2.{network}.fsdp.of_ddp", 0.55, f"FSDP of {network}, memory, of our DDP's", at_most=True),
        Target(f"sharding_memory.{network}.growth", 1.15, f"FSDP of {network}, memory on 4 ranks, of that on 2", at_most=True)))

PIPELINE_TARGETS = (
    *(Target(f"pipeline.sleep.{ranks}.{schedule}.over_theory", 1.05, f"pipeline of sleeping layers, {schedule}, {ranks} ranks, of theory",
             at_most=True)
      for ranks in (2, 4) for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")),
    *(Target(f"pipeline.sleep.{ranks}.zero_bubble_of_1F1B", 1, f"the same, {ranks} ranks, zero bubble of 1F1B", at_most=True)
      for ranks in (2, 4)),
    *(Target(f"pipeline.sleep.{ranks}.{schedule}.vs_{peer}", 1, f"the same, {schedule}, {ranks} ranks, faster than {words}")
      for ranks in (2, 4) for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
      for peer, words in (("gloo", "torch's with Gloo"), ("torch_on_ours", "torch's with Lockstep"))))

LAUNCH_TARGETS = (
    *(Target(f"launch.start.{layout}.{program}.vs_torchrun", bound, f"start to the first collective, {layout}, {words}")
      for layout in ("1x2", "1x8", "2x1", "2x4") for program, bound, words in (
        ("cpp", 3, "C++, faster than torchrun"), ("python", 1, "Python, not slower than torchrun"))),
    Target("launch.worker.2x1.cpp.vs_torchrun", 8, "a worker is killed, to the next collective, C++, faster than torchrun"),
    Target("launch.worker.2x1.python.vs_torchrun", 1.5, "the same, Python, faster than torchrun"))

TARGETS = (
    Target("cells.least", 1, "every operation, size and number of ranks: the slowest against Gloo"),
    Target("cells.median", 5, "every operation, size and number of ranks: the median against Gloo"),
    Target("all_reduce.2.4B.over_bare_barrier", 25, "all_reduce 4 bytes, of a bare barrier of two processes", at_most=True),
    Target("all_reduce.2.4KiB.arena_vs_gloo", 50, "all_reduce 4 KiB, in the arena, faster than Gloo"),
    Target("all_reduce.2.64KiB.arena_vs_gloo", 50, "all_reduce 64 KiB, in the arena, faster than Gloo"),
    Target("all_reduce.2.25MiB.arena_vs_gloo", 10, "all_reduce 25 MiB, in the arena, faster than Gloo"),
    Target("all_reduce.2.100MiB.arena_vs_gloo", 6, "all_reduce 100 MiB, in the arena, faster than Gloo"),
    Target("all_reduce.2.25MiB.arena_vs_mpi", 4, "all_reduce 25 MiB, in the arena, faster than Open MPI"),
    Target("all_reduce.2.100MiB.arena_vs_mpi", 3, "all_reduce 100 MiB, in the arena, faster than Open MPI"),
    Target("all_reduce_cpu.2.25MiB.arena_vs_gloo", 6, "all_reduce 25 MiB, in the arena, less processor time than Gloo"),
    Target("all_reduce.4.1MiB.arena_vs_gloo", 50, "all_reduce 1 MiB on 4 ranks, in the arena, faster than Gloo"),
    Target("all_reduce.2.25MiB.vs_gloo", 4, "all_reduce 25 MiB, plain, faster than Gloo"),
    *STEP_TARGETS,
    *HOST_TARGETS,
    *(Target(f"python_all_reduce.2.{size}.vs_gloo", bound, f"all_reduce {shown} from Python, faster than Gloo")
      for size, shown, bound in (("4B", "4 B", 10), ("64B", "64 B", 10), ("1KiB", "1 KiB", 10), ("4KiB", "4 KiB", 10),
                                 ("64KiB", "64 KiB", 10), ("25MiB", "25 MiB", 8))),
    Target("data.memory.0.vs_python", 3, "epoch of tensors in memory, faster than torch's DataLoader"),
    Target("data.memory.2.vs_python", 3, "the same, 2 workers each"),
    Target("data.jpeg.0.vs_python", 1, "epoch of a JPEG folder, not slower than torchvision's"),
    Target("data.jpeg.2.vs_python", 1, "the same, 2 workers each"),
    Target("data.parquet.1.vs_python", 1, "epoch of a Parquet file, not slower than pyarrow's with torch's DataLoader"),
    Target("checkpoint.save.nosync.vs_torch", 1.5, "save 1 GiB without fsync, faster than torch.save"),
    Target("checkpoint.save.sync.vs_torch", 1, "save 1 GiB with fsync, not slower than torch.save and fsync"),
    Target("checkpoint.load.verify.vs_torch", 1, "load 1 GiB and check it, not slower than torch.load"),
    Target("checkpoint.bytes_over_data", 1.01, "bytes written, of the tensors' bytes", at_most=True),
    Target("checkpoint.async.of_sync", 0.05, "an asynchronous save holds up, of a synchronous one", at_most=True),
    *(Target(f"profiler.{how}.vs_python", 1, f"an operator that is recorded{words}, adds no more than in torch.profiler")
      for how, words in (("plain", ""), ("shapes", " with shapes"), ("memory", ", memory, too"),
                         ("stack", ", stacks of C++ here and of Python there, too"), ("flops", " with shapes and flops"))),
    *(Target(f"profiler.{what}.vs_python", 1, f"a recording's end and its file{words} take no longer than in torch.profiler")
      for what, words in (("export", ""), ("export_stack", " with all but flops"))),
    Target("profiler.phases.of_allowed", 1, "what a step tells of its phases, always, of 1 us", at_most=True),
    Target("profiler.merge.memory_of_traces", 0.64, "merging traces of 64 ranks, memory, of their bytes", at_most=True),
    *SHARDING_TARGETS,
    Target("sweep.pause.of_allowed", 1, "sweep, from the end of a job to the next, of 50 ms", at_most=True),
    *PIPELINE_TARGETS,
    *LAUNCH_TARGETS,
    Target("python_step.2.small.lockstep_ddp.vs_gloo", 2, "Python DDP, small network, faster than over Gloo"),
    Target("python_step.2.large.lockstep_ddp.vs_gloo", 1.25, "Python DDP, large network, faster than over Gloo"),
)


def judge(results):
    """[(target, measured value, whether it is met)] of those that were measured."""
    values = [(target, measured(results, target.figure)) for target in TARGETS]
    return [(target, value, target.is_met(value)) for target, value in values if value is not None]


def measured(results, figure):
    """The figure's median; None if it was not measured."""
    if figure not in OVER_CELLS:
        return results.median(figure)
    if "operations" not in results.options.get("suites", ()):
        return None
    ratios = collectives.cells(results).values()
    return OVER_CELLS[figure](ratios) if ratios else None

"""The suites that measure collectives: all_reduce, four_ranks, barrier, latency, operations.

A cell is an operation, a number of ranks and a size, which is that of a rank's larger side. We take part twice: with plain
tensors (`lockstep`), as a peer's users have them, and with tensors in shared memory (`arena`).
"""

import statistics
from dataclasses import dataclass

from benchmarks.driver import machine, stats
from benchmarks.driver.interleave import Turn, run_rounds

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4KiB": 4 * KIB, "64KiB": 64 * KIB, "1MiB": MIB, "25MiB": 25 * MIB, "100MiB": 100 * MIB}
RANKS = (2, 4)
OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter",
              "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send_recv")
CPU_SIZE = "25MiB"
PEERS = ("gloo", "mpi")
MPI_OPERATIONS = ("all_reduce", "broadcast", "all_gather")  # that benchmarks/peers/mpi_collectives.c knows
OURS = {"lockstep": "", "arena": "_arena"}  # and what our program calls the operation then
TURN_SECONDS = 0.1
# Tensors of a rank's larger side that all contenders of `operations` together hold for each rank: input and output, plain, in
# the arena, and the peer's, which makes copies too.
TENSORS_A_RANK = 8


@dataclass(frozen=True)
class Effort:
    """How long a cell is measured."""

    rounds: int
    seconds: float = TURN_SECONDS  # of a turn
    least: int = 4  # iterations


def all_reduce(fleet, results, rounds, generator):
    """all_reduce of each size on two ranks; processor time at 25 MiB."""
    for size in SIZES:
        bursts = measure_cell(fleet, results, "all_reduce", 2, size, Effort(rounds), generator)
        if size == CPU_SIZE:
            add_cpu_time(results, bursts, size)


def four_ranks(fleet, results, rounds, generator):
    """all_reduce of 1 MiB on four ranks, which is more than most small machines' cores."""
    measure_cell(fleet, results, "all_reduce", 4, "1MiB", Effort(rounds), generator)


def operations(fleet, results, rounds, generator):
    """Every operation, each size, two and four ranks: in a third of the rounds, for there are many."""
    rounds = min(rounds, max(3, rounds // 3))
    if "barrier_p50.2.vs_gloo" not in results.figures:
        barrier(fleet, results, rounds, generator)
    for ranks in RANKS:
        fleet.stop()  # what other numbers of ranks hold is memory that these may need
        sizes = sizes_that_fit(fleet, results, ranks)
        for operation in OPERATIONS:
            for size in sizes:
                if f"{operation}.{ranks}.{size}.vs_gloo" not in results.figures:  # else another suite measured it longer
                    effort = Effort(rounds, TURN_SECONDS / 2, least=4 if SIZES[size] <= MIB else 2)
                    measure_cell(fleet, results, operation, ranks, size, effort, generator)


def barrier(fleet, results, rounds, generator):
    """A barrier's median and 99th percentile, with two and four ranks."""
    for ranks in RANKS:
        fleet.say(f"barrier, {ranks} ranks")
        turns = [Turn(who, fleet.job(who, ranks), "barrier", 0, seconds=2 * TURN_SECONDS, most=2000, least=100)
                 for who in ("lockstep", *present(fleet, results, PEERS))]
        for who, bursts in run_rounds(turns, rounds, generator).items():
            walls = [stats.slowest_rank(burst.wall) for burst in bursts]
            for percent in (50, 99):
                results.add_series(f"barrier_p{percent}.{ranks}.{who}", "ns",
                                   [stats.percentile(wall, percent) for wall in walls])
        for percent in (50, 99):
            add_ratios(results, f"barrier_p{percent}.{ranks}")


def latency(fleet, results, rounds, generator):
    """A synchronous all_reduce of four bytes, against the bare barrier of two processes: what the machine costs."""
    if not present(fleet, results, ["bare"]):
        return
    fleet.say("all_reduce, 4 bytes, 2 ranks")
    ours, bare = "all_reduce.2.4B.lockstep", "flag_barrier.2.bare"
    turns = [Turn(ours, fleet.job("lockstep", 2), "all_reduce_latency", 4, TURN_SECONDS),
             Turn(bare, fleet.job("bare", 2), "barrier", 0, TURN_SECONDS)]
    add_times(results, run_rounds(turns, rounds, generator))
    results.add_ratio("all_reduce.2.4B.over_bare_barrier", ours, bare, better="lower")


def present(fleet, results, peers):
    """Those of the peers that are here; says who is left out."""
    here = []
    for peer in peers:
        reason = fleet.why_not(peer)
        if reason is None:
            here.append(peer)
        else:
            leave_out(fleet, results, reason)
    return here


def leave_out(fleet, results, reason):
    if reason not in results.skipped:
        results.skipped.append(reason)
        fleet.say(reason)


def sizes_that_fit(fleet, results, ranks, sizes=SIZES, tensors=TENSORS_A_RANK):
    """The sizes of which so many tensors a rank take no more than half of the memory that is free."""
    free = machine.available_memory()
    fitting = [size for size, length in sizes.items() if 2 * ranks * tensors * length <= free]
    if too_large := [size for size in sizes if size not in fitting]:
        leave_out(fleet, results, f"{', '.join(too_large)} on {ranks} ranks is left out: it takes more than half of the "
                  f"{free / 2**30:.1f} GiB of memory that are free")
    return fitting


def measure_cell(fleet, results, operation, ranks, size, effort, generator):
    """Adds series and ratios of an operation at one size; answers with the bursts."""
    fleet.say(f"{operation}, {size}, {ranks} ranks")
    cell = f"{operation}.{ranks}.{size}"
    who = {who: ("lockstep", operation + suffix) for who, suffix in OURS.items()}
    peers = [peer for peer in PEERS if peer != "mpi" or operation in MPI_OPERATIONS]
    who.update({peer: (peer, operation) for peer in present(fleet, results, peers)})
    turns = [Turn(f"{cell}.{name}", fleet.job(kind, ranks), command, SIZES[size], effort.seconds, least=effort.least)
             for name, (kind, command) in who.items()]
    bursts = run_rounds(turns, effort.rounds, generator)
    add_times(results, bursts)
    add_ratios(results, cell)
    return bursts


def add_times(results, bursts):
    for name, rounds in bursts.items():
        results.add_series(name, "ns", [statistics.median(stats.slowest_rank(burst.wall)) for burst in rounds])


def add_ratios(results, measure):
    """How much less of it we need than each peer: vs_gloo for plain tensors, arena_vs_gloo for those in shared memory."""
    for who in OURS:
        for peer in PEERS:
            if f"{measure}.{who}" in results.series and f"{measure}.{peer}" in results.series:
                prefix = "" if who == "lockstep" else f"{who}_"
                results.add_ratio(f"{measure}.{prefix}vs_{peer}", f"{measure}.{peer}", f"{measure}.{who}")


def add_cpu_time(results, bursts, size):
    """Processor nanoseconds of all ranks for each byte of the tensor, which is the same as seconds per GB."""
    for name, rounds in bursts.items():
        operation, ranks, _, who = name.split(".")
        per_byte = [sum(map(sum, burst.cpu)) / len(burst.cpu[0]) / SIZES[size] for burst in rounds]
        results.add_series(f"{operation}_cpu.{ranks}.{size}.{who}", "s/GB", per_byte)
    add_ratios(results, f"all_reduce_cpu.2.{size}")


def cells(results, who="lockstep"):
    """{cell: how many times faster than Gloo it is, in the median}; the barrier is one of them, for it has no tensors."""
    figure = "vs_gloo" if who == "lockstep" else f"{who}_vs_gloo"
    answer = {}
    for name in results.figures:
        cell, _, last = name.rpartition(".")
        if last == figure and cell.partition(".")[0] in (*OPERATIONS, "barrier_p50"):
            answer[cell] = results.median(name)
    return answer

"""The suites that measure collectives: all_reduce, four_ranks, barrier, others."""

import statistics

from benchmarks.driver import stats
from benchmarks.driver.interleave import Turn, run_rounds

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4KiB": 4 * KIB, "64KiB": 64 * KIB, "1MiB": MIB, "25MiB": 25 * MIB, "100MiB": 100 * MIB}
CPU_SIZE = "25MiB"
PEERS = ("gloo", "mpi")
TURN_SECONDS = 0.1


def all_reduce(fleet, results, rounds, generator):
    """all_reduce of each size on two ranks, shared and staged tensors; processor time at 25 MiB."""
    for size in SIZES:
        bursts = measure_sizes(fleet, results, "all_reduce", 2, size, rounds, generator)
        measure = f"all_reduce_staged.2.{size}"
        results.add_ratio(f"{measure}.vs_gloo", f"all_reduce.2.{size}.gloo", f"{measure}.lockstep")
        if size == CPU_SIZE:
            add_cpu_time(results, bursts, size)


def four_ranks(fleet, results, rounds, generator):
    """all_reduce of 1 MiB on four ranks, which is more than most small machines' cores."""
    measure_sizes(fleet, results, "all_reduce", 4, "1MiB", rounds, generator)


def others(fleet, results, rounds, generator):
    """broadcast and all_gather on two ranks."""
    for operation in ("broadcast", "all_gather"):
        for size in ("1MiB", "25MiB"):
            measure_sizes(fleet, results, operation, 2, size, rounds, generator)


def barrier(fleet, results, rounds, generator):
    """A barrier's median and 99th percentile, with two and four ranks."""
    for ranks in (2, 4):
        turns = [Turn(who, fleet.job(who, ranks), "barrier", 0, seconds=2 * TURN_SECONDS, most=2000, least=100)
                 for who in contenders(fleet, results)]
        for who, bursts in run_rounds(turns, rounds, generator).items():
            walls = [stats.slowest_rank(burst.wall) for burst in bursts]
            for percent in (50, 99):
                results.add_series(f"barrier_p{percent}.{ranks}.{who}", "ns",
                                   [stats.percentile(wall, percent) for wall in walls])
        for percent in (50, 99):
            add_ratios(results, f"barrier_p{percent}.{ranks}", [turn.name for turn in turns])


def contenders(fleet, results):
    """lockstep, and the peers that are here; says who is left out."""
    present = ["lockstep"]
    for peer in PEERS:
        reason = fleet.why_not(peer)
        if reason is None:
            present.append(peer)
        elif reason not in results.skipped:
            results.skipped.append(reason)
            fleet.say(reason)
    return present


def measure_sizes(fleet, results, operation, ranks, size, rounds, generator):
    """Adds series and ratios of an operation at one size; answers with the bursts."""
    fleet.say(f"{operation}, {size}, {ranks} ranks")
    measure = f"{operation}.{ranks}.{size}"
    who = contenders(fleet, results)
    turns = [Turn(f"{measure}.{name}", fleet.job(name, ranks), operation, SIZES[size], TURN_SECONDS) for name in who]
    if operation == "all_reduce" and ranks == 2:
        turns.append(Turn(f"all_reduce_staged.{ranks}.{size}.lockstep", fleet.job("lockstep", ranks), "all_reduce_staged",
                          SIZES[size], TURN_SECONDS))
    bursts = run_rounds(turns, rounds, generator)
    for name in bursts:
        results.add_series(name, "ns", [statistics.median(stats.slowest_rank(burst.wall)) for burst in bursts[name]])
    add_ratios(results, measure, who)
    return bursts


def add_ratios(results, measure, who):
    for peer in who:
        if peer != "lockstep":
            results.add_ratio(f"{measure}.vs_{peer}", f"{measure}.{peer}", f"{measure}.lockstep")


def add_cpu_time(results, bursts, size):
    """Processor nanoseconds of all ranks for each byte of the tensor, which is the same as seconds per GB."""
    for name, rounds in bursts.items():
        operation, ranks, _, who = name.split(".")
        per_byte = [sum(map(sum, burst.cpu)) / len(burst.cpu[0]) / SIZES[size] for burst in rounds]
        results.add_series(f"{operation}_cpu.{ranks}.{size}.{who}", "s/GB", per_byte)
    measured = {name.split(".")[3] for name in bursts if name.startswith("all_reduce.")}
    for peer in PEERS:
        if peer in measured:
            results.add_ratio(f"all_reduce_cpu.2.{size}.vs_{peer}", f"all_reduce_cpu.2.{size}.{peer}",
                              f"all_reduce_cpu.2.{size}.lockstep")

"""The suite `hosts`: network namespaces of this machine as hosts, on a wire of 1 Gbit/s and on one as fast as memory.

In each layout ours, Gloo as torch.distributed has it (flat), Open MPI, and Gloo in one group for each
slice (what passes between hosts in a hierarchical all_reduce, without its part inside the hosts) take turns in the same places.
Beside them plain sockets tell what the wire gives: the least that any all_reduce has to send over it, in both directions at once.

The hosts share this machine's cores, so what they compute says nothing; where it matters, computing is replaced by sleeping.
"""

import statistics
from dataclasses import dataclass

from benchmarks.driver.contenders import Place, hosts
from benchmarks.driver.interleave import QUICK_ROUNDS, Turn, run_rounds
from benchmarks.driver.suites.collectives import MIB, SIZES, add_times, leave_out, present
from benchmarks.driver.suites.training import add_steps

WIRES = {"1gbit": "1gbit", "unshaped": None}  # name: rate, as tc has it
SHAPED = "1gbit"
LAYOUTS = {"2x2": (2, 2), "2x1": (1, 1), "4x2": (2, 2, 2, 2), "1+3": (1, 3), "2+1": (2, 1)}  # ranks on each host
LAYOUTS_ON = {SHAPED: tuple(LAYOUTS), "unshaped": ("2x2", "2x1")}
LARGE, SMALL = "25MiB", "4KiB"
SMALL_LAYOUT = "2x2"  # of small operations
COMPRESSIONS = ("bf16", "int8")  # between hosts
OURS = {"lockstep": "all_reduce", **{each: f"all_reduce_{each}" for each in COMPRESSIONS}}
PEERS = ("gloo", "mpi")
TURN_SECONDS = 0.2  # where the wire's rate does not set it
# Steps of DDP with 24 MiB of gradients.
STEP_LAYOUT, STEP_NETWORK = "2x2", "large"
STEPS = {"lockstep": ("cpp", "ddp"), **{each: ("cpp", f"ddp_{each}") for each in COMPRESSIONS}, "python": ("python", "ddp")}
# The same with 25 MiB and 480 ms of sleep: two ranks on a host, but for one alone.
SCALING = {1: (1,), 2: (2,), 4: (2, 2), 8: (2, 2, 2, 2)}
SCALING_NETWORK = "sleeping"
# Steps after which DistributedDataParallel has built and sized its buckets for good.
SETTLING_STEPS = 12
SCALING_WHO = {"lockstep": "cpp", "python": "python"}


@dataclass(frozen=True)
class Effort:
    """How long the suite measures: what the wire's rate bounds is steady, and takes seconds for each round."""

    rounds: int
    iterations: int  # of a turn that the wire's rate bounds
    scaling_rounds: int
    scaling_ranks: tuple

    @classmethod
    def of(cls, rounds):
        if rounds <= QUICK_ROUNDS:
            return cls(rounds, 1, rounds, (min(SCALING), max(SCALING)))
        return cls(max(QUICK_ROUNDS, 2 * rounds // 3), 2, max(QUICK_ROUNDS, rounds // 3), tuple(SCALING))


def several_hosts(fleet, results, rounds, generator):
    """all_reduce, barrier and training steps over hosts; processor time; what the wire gives."""
    effort = Effort.of(rounds)
    for wire, rate in WIRES.items():
        layouts = {name: LAYOUTS[name] for name in LAYOUTS_ON[wire]}
        try:
            with fleet.hosts(max(map(len, layouts.values())), rate) as net:
                for name, layout in layouts.items():
                    measure_layout(fleet, results, wire, name, Place(net, layout), effort, generator)
                    fleet.stop()
                if wire == SHAPED:
                    steps(fleet, results, net, effort, generator)
                    scaling(fleet, results, net, effort, generator)
        except hosts.NotAllowed as error:
            leave_out(fleet, results, str(error))
            return


def measure_layout(fleet, results, wire, name, place, effort, generator):
    cell = f"hosts.{wire}.{name}"
    fleet.say(f"{name} ranks on a wire of {wire}")
    ranks, count = sum(place.layout), len(place.layout)
    peers = present(fleet, results, PEERS)
    jobs = {who: fleet.job(who, ranks, place) for who in ("lockstep", *peers)}
    size = whole(LARGE, ranks)
    large = {who: (jobs["lockstep"], operation, size) for who, operation in OURS.items()}
    large |= {peer: (jobs[peer], "all_reduce", size) for peer in peers}
    if is_hierarchical(place.layout):
        large["slices"] = (jobs["gloo"], "slices", size)
    # Each host has to send what it has got from the others and what it has reduced itself: 2 (n-1) / n of the tensor.
    wires = fleet.job("wire", count, Place(place.net, (1,) * count))
    large["wire"] = (wires, "exchange", 2 * size * (count - 1) // count)
    bursts = run_rounds([bounded_turn(f"{cell}.{LARGE}.{who}", what, effort) if wire == SHAPED else
                         Turn(f"{cell}.{LARGE}.{who}", *what, TURN_SECONDS) for who, what in large.items()],
                        effort.rounds, generator)
    add_times(results, bursts)
    add_cpu_time(results, cell, bursts)
    add_ratios(results, f"{cell}.{LARGE}", peers, OURS)
    results.add_ratio(f"{cell}.{LARGE}.of_wire", f"{cell}.{LARGE}.lockstep", f"{cell}.{LARGE}.wire", better="lower")
    if name != SMALL_LAYOUT:
        return
    for what, operation, argument in ((SMALL, "all_reduce", whole(SMALL, ranks)), ("barrier", "barrier", 0)):
        turns = [Turn(f"{cell}.{what}.{who}", jobs[who], operation, argument, TURN_SECONDS, most=1000, least=10)
                 for who in ("lockstep", *peers)]
        add_times(results, run_rounds(turns, effort.rounds, generator))
        add_ratios(results, f"{cell}.{what}", peers, ["lockstep"])


def is_hierarchical(layout):
    """Whether all hosts have the same number of ranks, more than one: so that each has a slice to exchange with its like."""
    return len(set(layout)) == 1 and layout[0] > 1


def bounded_turn(name, what, effort, settle=1):
    """Of iterations that take a good part of a second each."""
    return Turn(name, *what, seconds=0, most=effort.iterations, least=effort.iterations, settle=settle)


def whole(size, ranks):
    """Bytes: no more than the size, and as many numbers for each rank."""
    return SIZES[size] // (4 * ranks) * 4 * ranks


def add_ratios(results, measure, peers, ours):
    """How many times faster than each peer: vs_gloo for ours as it is, bf16_vs_gloo for what is compressed between hosts."""
    for who in ours:
        prefix = "" if who == "lockstep" else f"{who}_"
        for peer in peers:
            results.add_ratio(f"{measure}.{prefix}vs_{peer}", f"{measure}.{peer}", f"{measure}.{who}")


def add_cpu_time(results, cell, bursts):
    """Processor time that one all_reduce costs a rank, in the mean over ranks."""
    measure = f"hosts_cpu.{cell.partition('.')[2]}"
    for name, rounds in bursts.items():
        results.add_series(f"{measure}.{name.rpartition('.')[2]}", "ns",
                           [statistics.mean(statistics.mean(times) for times in burst.cpu) for burst in rounds])
    if f"{measure}.slices" in results.series:
        results.add_ratio(f"{measure}.of_slices", f"{measure}.lockstep", f"{measure}.slices", better="lower")


def steps(fleet, results, net, effort, generator):
    """Steps of DDP, ours in C++ and Python's over Gloo."""
    fleet.say(f"training steps of the {STEP_NETWORK} network over hosts, {STEP_LAYOUT}")
    place = Place(net, LAYOUTS[STEP_LAYOUT])
    cell = f"hosts_step.{SHAPED}.{STEP_LAYOUT}.{STEP_NETWORK}"
    add_steps(results, run_rounds(
        [bounded_turn(f"{cell}.{who}", (fleet.job(kind, sum(place.layout), place), mode, STEP_NETWORK), effort,
                      SETTLING_STEPS)
         for who, (kind, mode) in STEPS.items()], effort.rounds, generator))
    add_ratios(results, cell, ["python"], OURS)
    fleet.stop()


def scaling(fleet, results, net, effort, generator):
    """A simulation: ranks that sleep instead of computing, and exchange real gradients."""
    fleet.say("scaling with ranks that sleep instead of computing (a simulation), 1 to 8 ranks on 1 to 4 hosts")
    cell = f"hosts_scaling.{SHAPED}"
    add_steps(results, run_rounds(
        [bounded_turn(f"{cell}.{ranks}.{who}", (fleet.job(kind, ranks, Place(net, SCALING[ranks])), "ddp", SCALING_NETWORK),
                      effort, SETTLING_STEPS) for ranks in effort.scaling_ranks for who, kind in SCALING_WHO.items()],
        effort.scaling_rounds, generator))
    for ranks in effort.scaling_ranks:
        for who in SCALING_WHO:
            # N ranks do the work of N in a step's time; one alone does one.
            results.add_ratio(f"{cell}.{ranks}.{who}.efficiency", f"{cell}.1.{who}", f"{cell}.{ranks}.{who}")
    fleet.stop()


def bound(wire, layout):
    """Nanoseconds that a tensor of 25 MiB takes at the least on that wire, by its bits alone; None where it has no rate."""
    if WIRES[wire] is None:
        return None
    count = len(LAYOUTS[layout])
    # Of 1514 bytes of a full frame as tc counts it (no preamble, no gap) 1448 are payload: TCP has timestamps.
    return 2 * (count - 1) / count * 25 * MIB * 8 * 1514 / 1448

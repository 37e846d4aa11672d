"""The suites that measure training steps: what DistributedDataParallel adds to the work, here and in Python.

A step's time is a turn's time divided by its steps, the mean over ranks: the rate at which the job advances. Without
communication ranks do not wait for each other, and the slower of two would not stand for what both get done.
"""

import statistics
from dataclasses import dataclass

from benchmarks.driver import machine
from benchmarks.driver.interleave import Turn, measure, run_rounds
from benchmarks.driver.suites.collectives import leave_out

RANKS = (2, 4)
KINDS = ("cpp", "cpp_keep", "python", "python_keep")
# Whose communication is told: with malloc as it comes, and with one that keeps its pages.
PEERS = {"cpp": "python", "cpp_keep": "python_keep"}
ALL_CONTENDERS = (*((kind, mode) for kind in KINDS for mode in ("ddp", "alone")),
                  *((kind, mode) for kind in PEERS for mode in ("abreast", "single")))
# A network that fills memory is measured by the contenders that the answer needs; with more ranks, by fewer still.
FEW = {2: (("cpp", "ddp"), ("cpp", "alone"), ("cpp", "abreast"), ("cpp", "single"), ("cpp_keep", "alone"),
           ("cpp_keep", "abreast"), ("python", "ddp")),
       4: (("cpp", "ddp"), ("cpp", "alone"), ("python", "ddp"))}


@dataclass(frozen=True)
class Network:
    """One of benchmarks/networks.h."""

    parameters: int
    batch: int  # of a rank
    seconds: float = 0.5  # of a turn
    least: int = 4  # steps of a turn

    @property
    def fills_memory(self):
        return self.parameters > 50_000_000


NETWORKS = {"small": Network(203_530, 64, seconds=0.3), "large": Network(6_316_042, 128),
            "huge": Network(100_728_842, 32, seconds=1.5, least=2)}
# Networks of which only this is asked: which of their gradients the kernels write into the buckets.
LANDING = ("cnn", "transformer")
LANDING_STEPS = 10


def step(fleet, results, rounds, generator):
    """Steps of networks of 0.2 to 100 million parameters: with DDP, without communication, and on one rank alone."""
    for ranks in RANKS:
        for name, network in NETWORKS.items():
            contenders = FEW[ranks] if network.fills_memory else ALL_CONTENDERS
            if network.fills_memory:
                fleet.stop()  # the others' memory
                if not fits(fleet, results, name, network, ranks, contenders):
                    continue
            fleet.say(f"training steps of the {name} network, {ranks} ranks")
            turns = [turn(fleet, f"step.{ranks}.{name}.{kind}_{mode}", kind, ranks, mode, name)
                     for kind, mode in contenders]
            bursts = run_rounds(turns, fewer(rounds, ranks, network), generator)
            add_steps(results, bursts)
            add_figures(results, ranks, name)
            for kind, mode in contenders:
                if mode == "ddp":
                    add_communication(results, bursts, ranks, name, kind)
        fleet.stop()
    landing(fleet, results)


def tuning(fleet, results, rounds, generator):
    """Steps with the bucket sizes that DDP chooses itself, against buckets of 25 MiB."""
    for name, network in NETWORKS.items():
        contenders = (("cpp", "ddp"), ("cpp", "fixed"))
        if not fits(fleet, results, name, network, 2, contenders):
            continue
        fleet.say(f"bucket sizes for the {name} network, 2 ranks")
        cell = f"tuning.2.{name}"
        turns = [turn(fleet, f"{cell}.{kind}_{mode}", kind, 2, mode, name) for kind, mode in contenders]
        bursts = run_rounds(turns, fewer(rounds, 2, network), generator)
        add_steps(results, bursts)
        results.add_ratio(f"{cell}.cpp_ddp.vs_fixed", f"{cell}.cpp_fixed", f"{cell}.cpp_ddp")
        for each in bursts:
            add_facts(results, f"tuning_cap.{each.partition('.')[2]}", "bytes", bursts[each], "bucket_cap_bytes")
            add_facts(results, f"tuning_first_cap.{each.partition('.')[2]}", "bytes", bursts[each],
                      "first_bucket_cap_bytes")


def landing(fleet, results):
    """Where the gradients of networks land that are made of more than linear layers; nothing is timed."""
    for name in LANDING:
        fleet.say(f"gradients of the {name} network")
        steps = Turn(f"landing.2.{name}", fleet.job("cpp", 2), "ddp", name, seconds=0)
        add_landing(results, 2, name, [measure(steps, LANDING_STEPS, warmup=1)])


def turn(fleet, name, kind, ranks, mode, network):
    shape = NETWORKS[network]
    return Turn(name, fleet.job(kind, ranks), mode, network, shape.seconds, most=200, least=shape.least,
                ranks=(0,) if mode == "single" else None)


def fewer(rounds, ranks, network):
    """A third of the rounds where a turn takes long, and where there are more ranks than cores to be quiet on."""
    return min(rounds, max(3, rounds // 3)) if network.fills_memory or ranks > 2 else rounds


def fits(fleet, results, name, network, ranks, contenders):
    """Whether they take no more than half of the memory that is free; else says that the network is left out."""
    need, free = ranks * models(contenders) * 4 * network.parameters, machine.available_memory()
    if 2 * need > free:
        leave_out(fleet, results, f"the {name} network on {ranks} ranks is left out: its {need / 2**30:.1f} GiB are more than "
                  f"half of the {free / 2**30:.1f} GiB of memory that are free")
    return 2 * need <= free


def models(contenders):
    """How many times a rank's memory holds the parameters or as many gradients, with all of these beside each other."""
    held = 0
    for kind, mode in contenders:
        if mode in ("ddp", "fixed"):
            held += 2  # the parameters, and the buckets
        elif mode == "alone":
            held += 2 if kind.endswith("keep") else 1  # which abreast and single share; malloc may keep the gradients' memory
    return held + 1  # the gradients of the ranks that train


def mean_step(burst):
    return statistics.mean(statistics.mean(times) for times in burst.wall)


def mean_cpu(burst):
    """Processor time of a rank's step, of all its threads."""
    return statistics.mean(statistics.mean(times) for times in burst.cpu)


def add_steps(results, bursts):
    for name, rounds in bursts.items():
        results.add_series(name, "ns", [mean_step(burst) for burst in rounds])


def add_figures(results, ranks, network):
    """Overhead is counted against the better of the baselines, one for each form of malloc.

    Ranks abreast exchange nothing either, but wait for each other after each step, as averaging gradients demands.
    """
    measure = f"step.{ranks}.{network}"
    alone, abreast = ([name for kind in PEERS if (name := f"{measure}.{kind}_{mode}") in results.series]
                      for mode in ("alone", "abreast"))
    for kind, python in PEERS.items():
        ours = f"{measure}.{kind}_ddp"
        if ours not in results.series:
            continue
        results.add_ratio(f"{ours}.over_baseline", ours, min(alone, key=results.median), better="lower")
        if abreast:
            results.add_ratio(f"{ours}.over_abreast", ours, min(abreast, key=results.median), better="lower")
        results.add_ratio(f"{ours}.over_default", ours, f"{measure}.cpp_alone", better="lower")
        results.add_ratio(f"{ours}.vs_{python}", f"{measure}.{python}_ddp", ours)
        if f"{measure}.{kind}_single" in results.series:
            # N ranks do the work of N batches in a step's time; one process alone does one.
            results.add_ratio(f"{ours}.efficiency", f"{measure}.{kind}_single", ours)


def add_communication(results, bursts, ranks, network, kind):
    """What a contender's communication costs in processor time, how much of it is hidden, and which copies it saves."""
    cell = f"{ranks}.{network}"
    with_ddp = bursts[f"step.{cell}.{kind}_ddp"]
    if alone := bursts.get(f"step.{cell}.{kind}_alone"):
        results.add_series(f"step_cpu.{cell}.{kind}", "ns",
                           [mean_cpu(ours) - mean_cpu(theirs) for ours, theirs in zip(with_ddp, alone)])
    add_share(results, f"step_hidden.{cell}.{kind}", with_ddp, "backward_compute_comm_overlap_time", "backward_comm_time")
    if kind in PEERS:
        add_landing(results, ranks, network, with_ddp)


def add_landing(results, ranks, network, bursts):
    cell = f"{ranks}.{network}"
    if f"step_gradients.{cell}" not in results.series:
        add_facts(results, f"step_gradients.{cell}", "bytes", bursts, "gradient_bytes")
        add_share(results, f"step_in_place.{cell}", bursts, "gradient_bytes_in_place", "gradient_bytes")


def add_facts(results, name, unit, bursts, fact):
    """One series of what the ranks told besides times, in the mean over them."""
    if all(fact in facts for burst in bursts for facts in burst.facts):
        results.add_series(name, unit, [statistics.mean(facts[fact] for facts in burst.facts) for burst in bursts])


def add_share(results, name, bursts, part, whole):
    if all(facts.get(whole) and part in facts for burst in bursts for facts in burst.facts):
        results.add_series(name, "share", [statistics.mean(facts[part] / facts[whole] for facts in burst.facts)
                                           for burst in bursts])

"""The suite `sharding`: FullyShardedDataParallel against our DistributedDataParallel and PyTorch's fully_shard over Gloo.

All train with AdamW. A contender's memory is what its ranks hold together at most while they make some steps: the sum of
their proportional set sizes, in which each shared page counts once. It is looked at from outside, in steps that are not timed.
"""

import threading

from benchmarks.driver import machine
from benchmarks.driver.collectives import leave_out, present
from benchmarks.driver.interleave import Turn, measure, run_rounds
from benchmarks.driver.training import NETWORKS as MULTILAYER
from benchmarks.driver.training import Network, add_steps, fewer

RANKS = (2, 4)
NETWORKS = {"transformer_25m": Network(24_165_888, 4, seconds=1.5, least=2), "huge": MULTILAYER["huge"]}
# Name: (contender, mode)
CONTENDERS = {"fsdp": ("sharding_fsdp", "fsdp"), "ddp": ("sharding_ddp", "ddp"), "alone": ("sharding_alone", "alone"),
              "python": ("python_sharding", "fsdp")}
COPIES = 4  # of the parameters, that AdamW needs: themselves, gradients, and its two states
MEMORY_STEPS, MEMORY_ROUNDS = 3, 3
LOOK_SECONDS = 0.02


def sharding(fleet, results, rounds, generator):
    """Time of a step, and memory of the job."""
    here = present(fleet, results, [kind for kind, _ in CONTENDERS.values()])
    for network, shape in NETWORKS.items():
        for ranks in RANKS:
            fleet.stop()  # memory is measured with nothing but this in it
            names = [name for name, (kind, _) in CONTENDERS.items() if kind in here]
            if shape.fills_memory and ranks > RANKS[0]:
                names = [name for name in names if name != "alone"]
            if names and fits(fleet, results, network, shape, ranks, names):
                compare(fleet, results, rounds, generator, network, ranks, names)
        add_growth(results, network)
    fleet.stop()


def compare(fleet, results, rounds, generator, network, ranks, names):
    fleet.say(f"sharded training steps of the {network} network, {ranks} ranks")
    shape, cell = NETWORKS[network], f"sharding.{ranks}.{network}"
    turns = {name: Turn(f"{cell}.{name}", fleet.job(kind, ranks), mode, network, shape.seconds, most=50, least=shape.least)
             for name, (kind, mode) in CONTENDERS.items() if name in names}
    add_steps(results, run_rounds(list(turns.values()), fewer(rounds, ranks, shape), generator))
    memory = f"sharding_memory.{ranks}.{network}"
    looks = min(rounds, MEMORY_ROUNDS)
    for name, turn in turns.items():
        results.add_series(f"{memory}.{name}", "bytes", [peak_memory(turn) for _ in range(looks)])
    results.add_series(f"{memory}.least", "bytes", [COPIES * 4 * shape.parameters] * looks)
    for peer in ("python", "ddp", "alone"):
        if "fsdp" in names and peer in names:
            results.add_ratio(f"{cell}.fsdp.vs_{peer}", f"{cell}.{peer}", f"{cell}.fsdp")
            results.add_ratio(f"{memory}.fsdp.of_{peer}", f"{memory}.fsdp", f"{memory}.{peer}", better="lower")


def peak_memory(turn):
    """The most that the job's ranks hold together while they make some steps, in bytes."""
    seen, done = [turn.job.memory()], threading.Event()

    def look():
        while not done.wait(LOOK_SECONDS):
            seen.append(turn.job.memory())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        measure(turn, MEMORY_STEPS, warmup=0)
    finally:
        done.set()
        looking.join()
    return max(seen)


def add_growth(results, network):
    few, many = (f"sharding_memory.{ranks}.{network}.fsdp" for ranks in RANKS)
    if few in results.series and many in results.series:
        results.add_ratio(f"sharding_memory.{network}.growth", many, few, better="lower")


def fits(fleet, results, network, shape, ranks, names):
    """Whether they take no more than three quarters of the memory that is free; else says that the network is left out."""
    whole = {"fsdp": COPIES + 2, "python": COPIES + 2 + ranks, "ddp": COPIES * ranks, "alone": COPIES * ranks}
    need, free = sum(whole[name] for name in names) * 4 * shape.parameters, machine.available_memory()
    if 4 * need > 3 * free:
        leave_out(fleet, results, f"the {network} network, sharded on {ranks} ranks, is left out: {need / 2**30:.1f} GiB are "
                  f"more than three quarters of the {free / 2**30:.1f} GiB of memory that are free")
    return 4 * need <= 3 * free

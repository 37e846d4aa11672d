"""The suite `sharding`: FullyShardedDataParallel against our DistributedDataParallel and PyTorch's FSDP over Gloo.

All train with AdamW: on one host, where ours has the weights once in shared memory, or gathers them if told; and on two hosts,
network namespaces on a wire of 1 Gbit/s, with a model on each host (HYBRID_SHARD) and with one over all ranks (FULL_SHARD). A
contender's memory is what its ranks hold together at most while they make some steps: the sum of their proportional set
sizes, in which each shared page counts once. It is looked at from outside, in steps that are not timed.

Where weights are gathered, an observer looks at all operators of the process; beside the steps is told what that costs each.
"""

import statistics
import threading

from benchmarks.driver import machine
from benchmarks.driver.contenders import Place, hosts
from benchmarks.driver.interleave import QUICK_ROUNDS, Turn, measure, run_rounds
from benchmarks.driver.suites.collectives import leave_out, present
from benchmarks.driver.suites.training import NETWORKS as MULTILAYER
from benchmarks.driver.suites.training import Network, add_steps, fewer

RANKS = (2, 4)
NETWORKS = {"transformer_25m": Network(24_165_888, 4, seconds=1.5, least=2), "huge": MULTILAYER["huge"]}
# Name: (contender, mode)
CONTENDERS = {"fsdp": ("sharding_fsdp", "fsdp"), "ddp": ("sharding_ddp", "ddp"), "alone": ("sharding_alone", "alone"),
              "python": ("python_sharding", "fsdp")}
FORMS = {"fsdp": CONTENDERS["fsdp"], "gather": ("sharding_gather", "gather"), "grad_op": ("sharding_grad_op", "grad_op"),
         "python": CONTENDERS["python"]}
OVER_HOSTS = {"hybrid": ("sharding_hybrid", "hybrid"), "full": ("sharding_fsdp", "fsdp"),
              "python_hybrid": ("python_sharding_hybrid", "hybrid"), "python_full": CONTENDERS["python"]}
FORMS_NETWORK = HOSTS_NETWORK = "transformer_25m"
HOSTS_WIRE, HOSTS_LAYOUT = "1gbit", (2, 2)  # a rate, as tc has it, and the ranks of each host
HOSTS_CELL = f"sharding_hosts.{HOSTS_WIRE}.{'x'.join(map(str, HOSTS_LAYOUT))}.{HOSTS_NETWORK}"
COPIES = 4  # of the parameters, that AdamW needs: themselves, gradients, and its two states
MEMORY_STEPS, MEMORY_ROUNDS = 3, 3
LOOK_SECONDS = 0.02
# Of 4 numbers: in a process without an observer, in one with it, and where they are given gathered weights.
OPERATORS = {"plain": "no observer", "observed": "observed", "gathered": "observed, given a gathered parameter"}
OPERATOR_COUNT = 10_000  # in an iteration


def sharding(fleet, results, rounds, generator):
    """Time of a step, and memory of the job."""
    here = present(fleet, results, sorted({kind for kind, _ in (CONTENDERS | FORMS | OVER_HOSTS).values()}))
    for network, shape in NETWORKS.items():
        for ranks in RANKS:
            fleet.stop()  # memory is measured with nothing but this in it
            contenders = {name: what for name, what in CONTENDERS.items() if what[0] in here}
            if shape.fills_memory and ranks > RANKS[0]:
                contenders.pop("alone", None)
            cell = f"sharding.{ranks}.{network}"
            copies = {"fsdp": COPIES + 2, "python": COPIES + 2 + ranks, "ddp": COPIES * ranks, "alone": COPIES * ranks}
            if not fits(fleet, results, f"the {network} network, sharded on {ranks} ranks,", shape, copies, contenders):
                continue
            compare(fleet, results, rounds, generator, cell, contenders, network, ranks)
            results.add_series(f"{memory_of(cell)}.least", "bytes", [COPIES * 4 * shape.parameters] * min(rounds, MEMORY_ROUNDS))
            add_ratios(results, cell, "fsdp", contenders)
        add_growth(results, network)
    forms(fleet, results, rounds, generator, here)
    over_hosts(fleet, results, rounds, generator, here)
    operators(fleet, results, rounds, generator, here)
    fleet.stop()


def forms(fleet, results, rounds, generator, here):
    """On one host, weights once in shared memory against weights that are gathered."""
    contenders = {name: what for name, what in FORMS.items() if what[0] in here}
    for ranks in RANKS:
        fleet.stop()
        cell, shape = f"sharding_forms.{ranks}.{FORMS_NETWORK}", NETWORKS[FORMS_NETWORK]
        copies = {"fsdp": COPIES + 2, "gather": COPIES + 2, "grad_op": COPIES + 2 + ranks, "python": COPIES + 2 + ranks}
        if fits(fleet, results, f"gathering the {FORMS_NETWORK} network on {ranks} ranks", shape, copies, contenders):
            compare(fleet, results, rounds, generator, cell, contenders, FORMS_NETWORK, ranks)
            for ours in ("fsdp", "gather", "grad_op"):
                add_ratios(results, cell, ours, contenders)


def over_hosts(fleet, results, rounds, generator, here):
    """On two hosts: what a rank waits for is the wire, so a step takes seconds."""
    fleet.stop()
    contenders = {name: what for name, what in OVER_HOSTS.items() if what[0] in here}
    shape, ranks = NETWORKS[HOSTS_NETWORK], sum(HOSTS_LAYOUT)
    whole = {"hybrid": len(HOSTS_LAYOUT) * (COPIES + 2), "full": COPIES + 2}
    copies = whole | {f"python_{name}": count + ranks for name, count in whole.items()}
    if not fits(fleet, results, f"the {HOSTS_NETWORK} network, sharded over hosts,", shape, copies, contenders):
        return
    quick = rounds <= QUICK_ROUNDS
    try:
        with fleet.hosts(len(HOSTS_LAYOUT), HOSTS_WIRE) as net:
            compare(fleet, results, 1 if quick else max(QUICK_ROUNDS, rounds // 2), generator, HOSTS_CELL, contenders,
                    HOSTS_NETWORK, ranks, Place(net, HOSTS_LAYOUT), iterations=1 if quick else 2, looks=1)
            for ours in ("hybrid", "full"):
                add_ratios(results, HOSTS_CELL, ours, contenders)
            fleet.stop()
    except hosts.NotAllowed as error:
        leave_out(fleet, results, str(error))


def operators(fleet, results, rounds, generator, here):
    """What the observer costs a small operator."""
    fleet.stop()
    if "sharding_gather" not in here:
        return
    fleet.say("small operators while they are observed")
    turns = [Turn(f"sharding_operator.{how}", fleet.job("sharding_gather", 1), f"operators:{how}", OPERATOR_COUNT, seconds=0.2,
                  most=20, least=2) for how in OPERATORS]
    for name, bursts in run_rounds(turns, rounds, generator).items():
        results.add_series(name, "ns", [statistics.median(burst.wall[0]) / OPERATOR_COUNT for burst in bursts])


def memory_of(cell):
    """The name of a cell's memory."""
    what, _, rest = cell.partition(".")
    return f"{what}_memory.{rest}"


def compare(fleet, results, rounds, generator, cell, contenders, network, ranks, place=None, iterations=None, looks=MEMORY_ROUNDS):
    """Times and memory of {name: (contender, mode)}. With `iterations` a turn has so many steps, whatever they take."""
    fleet.say(f"sharded training steps of the {network} network, {ranks} ranks{' over hosts' if place else ''}")
    shape = NETWORKS[network]
    limits = {"seconds": 0, "most": iterations, "least": iterations, "settle": 2} if iterations else {
        "seconds": shape.seconds, "most": 50, "least": shape.least}
    turns = {name: Turn(f"{cell}.{name}", fleet.job(kind, ranks, place), mode, network, **limits)
             for name, (kind, mode) in contenders.items()}
    add_steps(results, run_rounds(list(turns.values()), rounds if iterations else fewer(rounds, ranks, shape), generator))
    for name, turn in turns.items():
        results.add_series(f"{memory_of(cell)}.{name}", "bytes", [peak_memory(turn) for _ in range(min(rounds, looks))])


def add_ratios(results, cell, ours, contenders):
    """How many times faster ours is than each other one, and its memory of that one's."""
    memory = memory_of(cell)
    for peer in contenders:
        if ours in contenders and peer != ours:
            results.add_ratio(f"{cell}.{ours}.vs_{peer}", f"{cell}.{peer}", f"{cell}.{ours}")
            results.add_ratio(f"{memory}.{ours}.of_{peer}", f"{memory}.{ours}", f"{memory}.{peer}", better="lower")


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


def fits(fleet, results, what, shape, copies, names):
    """Whether they take no more than three quarters of the memory that is free; else says that it is left out. `copies`: of the
    parameters, that the contenders hold."""
    need, free = sum(copies[name] for name in names) * 4 * shape.parameters, machine.available_memory()
    if 4 * need > 3 * free:
        leave_out(fleet, results, f"{what} is left out: {need / 2**30:.1f} GiB are "
                  f"more than three quarters of the {free / 2**30:.1f} GiB of memory that are free")
    return bool(names) and 4 * need <= 3 * free

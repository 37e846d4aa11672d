"""The suite `python`: our engine as a backend of torch.distributed, against Gloo, both called from Python.

all_reduce is timed over two groups of the same processes, so that a round's ratio is that of two backends under the
same interpreter, on the same cores, with the same buffer. Training is one script that is given the name of its backend,
as a user's would be, and so has processes of its own for each.
"""

from benchmarks.driver.interleave import Turn, run_rounds
from benchmarks.driver.suites.collectives import KIB, MIB, RANKS, TURN_SECONDS, add_times, present, sizes_that_fit
from benchmarks.driver.suites.training import NETWORKS, mean_step

BACKENDS = ("lockstep", "gloo")
FORMS = ("all_reduce", "all_reduce_async")
SIZES = {"4B": 4, "64B": 64, "1KiB": KIB, "4KiB": 4 * KIB, "64KiB": 64 * KIB, "1MiB": MIB, "25MiB": 25 * MIB,
         "100MiB": 100 * MIB}
TRAIN_SIZES = ("4B", "64KiB", "25MiB")
# The buffer, and what a backend copies of it.
TENSORS_A_RANK = 4
STEP_RANKS = 2
STEP_NETWORKS = ("large", "small")
# Who of training's contenders: (kind, mode, ranks that take part). Without communication the backend plays no part.
STEPS = {"lockstep_ddp": ("python_lockstep", "ddp", None), "gloo_ddp": ("python", "ddp", None),
         "alone": ("python", "alone", None), "single": ("python", "single", (0,))}


def python(fleet, results, rounds, generator):
    """all_reduce of 4 bytes to 100 MiB on two and four ranks, its processor time, and training steps with DDP."""
    if not present(fleet, results, ["python_groups"]):
        return
    for ranks in RANKS:
        all_reduce(fleet, results, ranks, rounds, generator)
        fleet.stop()
    steps(fleet, results, rounds, generator)


def all_reduce(fleet, results, ranks, rounds, generator):
    sizes = sizes_that_fit(fleet, results, ranks, SIZES, TENSORS_A_RANK)
    for size in sizes:
        measure(fleet, results, FORMS, ranks, size, rounds, generator)
    for size in TRAIN_SIZES:
        if size in sizes:
            bursts = measure(fleet, results, ["all_reduce_train"], ranks, size, rounds, generator)
            add_processor_time(results, bursts, ranks, size)


def measure(fleet, results, forms, ranks, size, rounds, generator):
    """Adds series and ratios of these forms of the operation, whose turns alternate; answers with the bursts."""
    fleet.say(f"{', '.join(forms)} from Python, {size}, {ranks} ranks")
    job = fleet.job("python_groups", ranks)
    turns = [Turn(f"python_{form}.{ranks}.{size}.{backend}", job, f"{backend}:{form}", SIZES[size], TURN_SECONDS,
                  least=4 if SIZES[size] <= MIB else 2) for form in forms for backend in BACKENDS]
    bursts = run_rounds(turns, rounds, generator)
    add_times(results, bursts)
    for form in forms:
        add_ratio(results, f"python_{form}.{ranks}.{size}")
    return bursts


def add_processor_time(results, bursts, ranks, size):
    """What one call costs all ranks together, threads of the backends included."""
    cell = f"python_processor.{ranks}.{size}"
    for name, rounds in bursts.items():
        backend = name.rpartition(".")[2]
        results.add_series(f"{cell}.{backend}", "ns", [sum(sum(times) / len(times) for times in burst.cpu)
                                                       for burst in rounds])
    add_ratio(results, cell)


def add_ratio(results, cell):
    results.add_ratio(f"{cell}.vs_gloo", f"{cell}.gloo", f"{cell}.lockstep")


def steps(fleet, results, rounds, generator):
    """Steps of a small and a large network: DDP over either backend, without communication, and one process alone."""
    for network in STEP_NETWORKS:
        fleet.say(f"training steps of the {network} network from Python, {STEP_RANKS} ranks")
        cell = f"python_step.{STEP_RANKS}.{network}"
        turns = [Turn(f"{cell}.{who}", fleet.job(kind, STEP_RANKS), mode, network, NETWORKS[network].seconds,
                      most=200, ranks=ranks) for who, (kind, mode, ranks) in STEPS.items()]
        for name, bursts in run_rounds(turns, rounds, generator).items():
            results.add_series(name, "ns", [mean_step(burst) for burst in bursts])
        ours = f"{cell}.lockstep_ddp"
        results.add_ratio(f"{ours}.vs_gloo", f"{cell}.gloo_ddp", ours)
        results.add_ratio(f"{ours}.over_alone", ours, f"{cell}.alone", better="lower")

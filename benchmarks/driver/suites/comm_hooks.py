"""The suite `hooks`: communication hooks of DistributedDataParallel against its own all-reduce.

Of each: the time of a training step of the large network on two ranks, what a rank hands to collectives in it, and how well
the small network classifies Fashion-MNIST after training with it, from the same weights and the same images in the same
order as the others. On one host, whose "wire" is memory, a hook that computes in order to send less need not be faster.
"""

from benchmarks.driver import contenders
from benchmarks.driver.interleave import Turn, measure, run_rounds
from benchmarks.driver.suites.collectives import leave_out
from benchmarks.driver.suites.training import NETWORKS, add_facts, mean_step

HOOKS = ("all_reduce", "bf16", "fp16", "int8", "power_sgd")
RANKS = 2
NETWORK = "large"
TRAFFIC_STEPS = 5
EPOCHS = 2
SEEDS = 5  # at most one a round


def hooks(fleet, results, rounds, generator):
    """Time and traffic of a step, and accuracy, with each hook and with none."""
    fleet.say(f"communication hooks, {NETWORK} network, {RANKS} ranks")
    job = fleet.job("hooks", RANKS)
    cell = f"hooks_step.{RANKS}.{NETWORK}"
    seconds = NETWORKS[NETWORK].seconds
    turns = [Turn(f"{cell}.{hook}", job, f"step:{hook}", NETWORK, seconds, most=200) for hook in HOOKS]
    for name, bursts in run_rounds(turns, rounds, generator).items():
        results.add_series(name, "ns", [mean_step(burst) for burst in bursts])
    for hook in HOOKS:
        if hook != "all_reduce":
            results.add_ratio(f"{cell}.{hook}.vs_all_reduce", f"{cell}.all_reduce", f"{cell}.{hook}")
        steps = Turn(f"traffic.{hook}", job, f"traffic:{hook}", NETWORK, seconds=0)
        counted = [measure(steps, TRAFFIC_STEPS, warmup=1)]
        add_facts(results, f"hooks_sent.{RANKS}.{NETWORK}.{hook}", "bytes", counted, "input_bytes")
        add_facts(results, f"hooks_received.{RANKS}.{NETWORK}.{hook}", "bytes", counted, "output_bytes")
    accuracy(fleet, results, job, rounds, generator)


def accuracy(fleet, results, job, rounds, generator):
    if not any(contenders.DATA.rglob("train-images-idx3-ubyte*")):
        leave_out(fleet, results, f"accuracy is left out: there is no Fashion-MNIST in {contenders.DATA} (Debian: "
                  "dataset-fashion-mnist, or set LOCKSTEP_DATA_DIR)")
        return
    seeds = range(min(rounds, SEEDS))
    fleet.say(f"accuracy on Fashion-MNIST, {EPOCHS} epochs, {len(seeds)} times for each hook")
    trained = {hook: [] for hook in HOOKS}
    for seed in seeds:
        for hook in generator.sample(HOOKS, len(HOOKS)):
            trained[hook].append(measure(Turn(hook, job, f"accuracy:{hook}", seed, seconds=0), EPOCHS, warmup=0))
    for hook, bursts in trained.items():
        add_facts(results, f"hooks_accuracy.{RANKS}.fashion_mnist.{hook}", "share", bursts, "accuracy")

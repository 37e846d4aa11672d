"""How a peer's rank written in Python talks to the driver: the protocol of benchmarks/command_loop.h."""

import gc
import json
import os
import sys

import torch
import torch.distributed as dist

CHANNEL = "LOCKSTEP_BENCH_CHANNEL"
BACKEND = "LOCKSTEP_BENCH_BACKEND"


def register(backend):
    """What a user's script does before it names the backend: torch knows its own, ours comes with its package."""
    if backend == "lockstep":
        import lockstep  # noqa: F401


def start(backend):
    """Joins the default group, one thread for each rank. By hand, torchrun's environment says where to meet."""
    torch.set_num_threads(1)
    register(backend)
    channel = os.environ.get(CHANNEL)
    if channel:
        dist.init_process_group(backend, init_method=f"file://{channel}/rendezvous", rank=int(os.environ["RANK"]),
                                world_size=int(os.environ["WORLD_SIZE"]))
    else:
        dist.init_process_group(backend)


def run(measure, line):
    operation, argument, iterations, warmup = line.split()
    if int(iterations) <= 0 or int(warmup) < 0:
        raise ValueError(f"'{line.strip()}' is not a benchmark command")
    gc.collect()
    gc.disable()  # a collection in the middle would count against the peer
    try:
        wall, cpu, *facts = measure(operation, argument, int(iterations), int(warmup))
    finally:
        gc.enable()
    return json.dumps({"wall": wall, "cpu": cpu, "facts": facts[0] if facts else {}})


def serve(measure):
    """Runs the driver's commands until it is done; or the one on the command line.

    measure(operation, argument, iterations, warmup) answers with two lists of nanoseconds: wall-clock time, one entry per
    timed iteration, and processor time of the process, one entry per iteration or their mean (empty where that is not
    measured); and, where there is more to tell, with a dictionary of numbers.
    """
    rank = dist.get_rank()
    gc.freeze()  # torch's own objects: looking through them takes longer than many a measurement
    if len(sys.argv) > 1:
        print(f"rank {rank}:", run(measure, " ".join(sys.argv[1:])), flush=True)
    elif CHANNEL in os.environ:
        pipe = f"{os.environ[CHANNEL]}/{rank}"
        with open(f"{pipe}.commands") as commands, open(f"{pipe}.answers", "w", buffering=1) as answers:
            answers.write('{"ready": true}\n')
            while (line := commands.readline()) and line != "quit\n":
                answers.write(run(measure, line) + "\n")
    else:
        raise SystemExit("nothing to measure; do: scripts/bench, or give OPERATION ARGUMENT ITERATIONS WARMUP")
    dist.destroy_process_group()

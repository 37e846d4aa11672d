"""How a peer's rank written in Python talks to the driver: the protocol of benchmarks/command_loop.h."""

import faulthandler
import gc
import json
import os
import signal
import sys
import time

CHANNEL = "LOCKSTEP_BENCH_CHANNEL"
BACKEND = "LOCKSTEP_BENCH_BACKEND"
CPU_TIME_FROM_BYTES = 1 << 20  # below it, reading the clock would disturb


def register(backend):
    """What a user's script does before it names the backend: torch knows its own, ours comes with its package."""
    if backend == "lockstep":
        import lockstep  # noqa: F401


def start(backend):
    """Joins the default group, one thread for each rank. Over several hosts and by hand, torchrun's environment says where to
    meet; on one host it is a file beside the pipes, where no port can be taken."""
    import torch  # which takes seconds, and is no part of raw_wire.py
    import torch.distributed as dist

    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that the driver ends by force says where it stood
    torch.set_num_threads(1)
    register(backend)
    channel = os.environ.get(CHANNEL)
    if channel and "MASTER_ADDR" not in os.environ:
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
    """As serve_rank(), for a rank that start() has brought into the default group; leaves it in the end."""
    import torch.distributed as dist

    serve_rank(dist.get_rank(), measure)
    dist.destroy_process_group()


def serve_rank(rank, measure):
    """Runs the driver's commands until it is done; or the one on the command line.

    measure(operation, argument, iterations, warmup) answers with two lists of nanoseconds: wall-clock time, one entry per
    timed iteration, and processor time of the process, one entry per iteration or their mean (empty where that is not
    measured); and, where there is more to tell, with a dictionary of numbers.
    """
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


def timed(iterations, warmup, size, prepare, call, check, barrier):
    """Each iteration: fresh data, a barrier, the operation under the clock, a look at the result."""
    with_cpu = size >= CPU_TIME_FROM_BYTES
    wall, cpu = [], []
    for i in range(warmup + iterations):
        prepare(i)
        barrier()
        cpu_begin = time.process_time_ns() if with_cpu else 0
        begin = time.perf_counter_ns()
        call()
        end = time.perf_counter_ns()
        if i >= warmup:
            wall.append(end - begin)
            if with_cpu:
                cpu.append(time.process_time_ns() - cpu_begin)
        check(i)
    return wall, cpu

"""Measures Lockstep against its peers; scripts/bench builds everything and starts this."""

import argparse
import datetime
import pathlib
import random
import signal
import sys
import time

from benchmarks.driver import compare, contenders, machine, report, results
from benchmarks.driver.interleave import QUICK_ROUNDS
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites import (checkpoint, collectives, comm_hooks, data, from_python, gpu, largest_model, launch,
                                      pipeline, profiler, several_hosts, sharding, soak, startup, sweep, training)

SUITES = {"all_reduce": collectives.all_reduce, "four_ranks": collectives.four_ranks, "barrier": collectives.barrier,
          "latency": collectives.latency, "operations": collectives.operations, "step": training.step,
          "tuning": training.tuning, "hooks": comm_hooks.hooks, "python": from_python.python, "data": data.data,
          "checkpoint": checkpoint.checkpoint, "profiler": profiler.profiler, "sharding": sharding.sharding,
          "pipeline": pipeline.pipeline, "gpu": gpu.gpu,
          "startup": startup.startup, "hosts": several_hosts.several_hosts, "launch": launch.launch, "sweep": sweep.sweep,
          "largest": largest_model.largest_model, "soak": soak.soak}
# They share no contender with the suites before, which hold memory that these need.
BY_THEMSELVES = ("step", "tuning", "hooks", "python", "data", "checkpoint", "profiler", "sharding", "pipeline", "gpu",
                 "startup", "hosts", "launch", "sweep", "largest", "soak")
ONLY_WHERE_NAMED = ("hosts", "launch", "sweep", "largest")  # sweep takes long, the others need root
ROUNDS = 15
SOAK_ROUNDS, SOAK_QUICK_ROUNDS = 200, 20  # where it is the only suite
BUSY_LOAD = 0.7


def parse(arguments):
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.partition(";")[0] + ".", epilog="""
        Exit status: 0, or 1 if --compare found something slower, 2 if a measurement failed, 3 if the suite gpu was named
        and there is no GPU, or 4 if rounds of the suite soak failed, whatever --compare found.""")
    parser.add_argument("--quick", action="store_true",
                        help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}: some minutes, and more noise")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds in which each contender has a turn ({ROUNDS}); of soak "
                        f"alone, rounds with one failure each ({SOAK_ROUNDS}, {SOAK_QUICK_ROUNDS} with --quick)")
    parser.add_argument("--seconds", type=int, metavar="S",
                        help="how long soak may take; without --rounds it plays for that long")
    parser.add_argument("--hosts", type=int, choices=[2], help="ranks of soak are on two hosts, which are pretended")
    parser.add_argument("--cuts", action="store_true",
                        help="these hosts are network namespaces, whose wire soak cuts, too; needs root")
    parser.add_argument("--seed", type=int, metavar="N", help="of the order of turns, and of soak's first round (random)")
    parser.add_argument("--only", action="append", metavar="SUITE", choices=SUITES, help="one of: " + ", ".join(SUITES) +
                        "; may be given more than once")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="where the JSON goes (log/bench-DATE.json)")
    parser.add_argument("--compare", type=pathlib.Path, metavar="OLD.json",
                        help="name what got slower than in this earlier run, beyond the noise")
    parser.add_argument("--show", type=pathlib.Path, metavar="FILE", help="measure nothing; show this earlier run")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown, for documents")
    parser.add_argument("--bin", type=pathlib.Path, default=contenders.ROOT / "build/release/bin", metavar="FOLDER",
                        help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)  # of the suite gpu
    options = parser.parse_args(arguments)
    options.soak_rounds = options.rounds
    if options.rounds is None:
        quick, full = (SOAK_QUICK_ROUNDS, SOAK_ROUNDS) if options.only == ["soak"] else (QUICK_ROUNDS, ROUNDS)
        options.rounds = quick if options.quick else full
        options.soak_rounds = None if options.seconds else options.rounds
    for name in ("rounds", "seconds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it takes a whole number from 1 up")
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed is {options.seed}; it takes a whole number from 0 up")
    return options


def run(options):
    """Measures the suites, and answers with the Results."""
    begin = time.monotonic()

    def say(text):
        print(f"== [{time.monotonic() - begin:4.0f} s] {text}", flush=True)

    suites = options.only or [suite for suite in SUITES if suite not in ONLY_WHERE_NAMED]
    if options.only and "gpu" in options.only and (reason := gpu.why_not(options.device)):
        raise gpu.NoGpu(reason)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    answer = results.Results(machine.describe(), {"suites": suites, "rounds": options.rounds, "seconds": options.seconds,
                                                  "soak_rounds": options.soak_rounds, "seed": seed, "hosts": options.hosts,
                                                  "cuts": options.cuts})
    if answer.machine["load_at_start"] > BUSY_LOAD:
        say(f"note: the machine is busy (load {answer.machine['load_at_start']:.1f}); measure when it is quiet")
    generator = random.Random(seed)
    with contenders.Fleet(options.bin, say, options.device) as fleet:
        for suite in suites:
            if suite in BY_THEMSELVES:
                fleet.stop()
            SUITES[suite](fleet, answer, options.soak_rounds if suite == "soak" else options.rounds, generator)
            if answer.options.get("interrupted"):
                break
    return answer


def terminate(*_):
    raise KeyboardInterrupt  # so that the contenders are ended


def main():
    options = parse(sys.argv[1:])
    try:
        old = results.load(options.compare) if options.compare else None
        if options.show:
            answer = results.load(options.show)
        else:
            now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            output = options.output or contenders.ROOT / f"log/bench-{now}.json"
            output.parent.mkdir(parents=True, exist_ok=True)  # before the minutes of measuring, not after
            answer = run(options)
            output.write_text(answer.to_json() + "\n")
            print(f"results: {output}")
    except gpu.NoGpu as error:
        print(f"bench: {error}", file=sys.stderr)
        return 3
    except (BenchmarkError, ValueError, OSError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the contenders have been ended", file=sys.stderr)
        return 130
    print("\n" + report.report(answer, options.markdown))
    if answer.options.get("interrupted") and not options.show:
        print("bench: interrupted; what was measured until then is above", file=sys.stderr)
        return 130
    changes = []
    if old is not None:
        changes, notes = compare.compare(old, answer)
        print("\n" + report.comparison(changes, notes))
    if answer.options.get("failed_rounds"):
        return 4
    return 1 if any(change.outcome == "slower" for change in changes) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())

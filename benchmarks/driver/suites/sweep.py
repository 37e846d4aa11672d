"""The suite `sweep`: the time that `lockstep sweep` takes between two trials, and that of a loop of Optuna alone.

Trials sleep for a second. A script around each notes when it began and ended: around the job of `lockstep run` in a sweep, around the
program itself in Optuna's loop (peers/python_sweep.py), which has the same sampler and storage. A pause is from the end of one script
to the begin of the next, so it contains the start of a Python, too, but no start of `lockstep run`.

Both studies grow from round to round, up to TRIALS trials.
"""

import importlib.util
import pathlib
import statistics
import subprocess
import sys
import tempfile

from benchmarks.driver.contenders import PEERS
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites.collectives import leave_out

CONTENDERS = {"lockstep": "lockstep sweep", "optuna": "Optuna's loop without Lockstep"}
TRIALS = 200  # of each contender, in all rounds together
SECONDS = 1  # of a trial
ALLOWED = 50_000_000  # nanoseconds of a pause
TIMEOUT = 20  # seconds of a trial at most
NOTER = """#!{python} -S
import os, sys, time
begin = time.monotonic_ns()
words = [*{before}, *sys.argv[1:]]
if "--parent-pid" in words:  # that of lockstep run is this process, and not the driver
    words[words.index("--parent-pid") + 1] = str(os.getpid())
status = os.spawnv(os.P_WAIT, words[0], words)
with open({notes!r}, "a") as file:
    print(begin, time.monotonic_ns(), file=file)
sys.exit(status)
"""
PROGRAM = """
import sys, time
seconds, lr, hidden = sys.argv[1:]
time.sleep(float(seconds))
print("loss:", abs(float(lr) - 0.01) + int(hidden) / 1000, flush=True)
"""


def sweep(fleet, results, rounds, generator):
    """Pauses between the trials of a sweep, and of Optuna's own loop."""
    for package in ("optuna", "lockstep_sweep"):
        if importlib.util.find_spec(package) is None:
            return leave_out(fleet, results, f"sweeps are left out: {sys.executable} has no package {package}")
    each = max(2, TRIALS // rounds)
    fleet.say(f"{rounds * each} trials of {SECONDS} s under {' and '.join(CONTENDERS.values())}")
    seen = {who: [] for who in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        for number in range(1, rounds + 1):
            for who in generator.sample(list(CONTENDERS), len(CONTENDERS)):
                seen[who].append(statistics.mean(pauses(fleet, who, pathlib.Path(folder), each, number * each)))
    for who, means in seen.items():
        results.add_series(f"sweep.pause.{who}", "ns", means)
    results.add_series("sweep.allowed", "ns", [ALLOWED] * rounds)
    results.add_ratio("sweep.pause.of_allowed", "sweep.pause.lockstep", "sweep.allowed", better="lower")
    results.add_ratio("sweep.pause.vs_optuna", "sweep.pause.optuna", "sweep.pause.lockstep")
    return None


def pauses(fleet, who, folder, count, total):
    """Nanoseconds between the next `count` trials of a contender, which then has had `total`."""
    notes, noter = folder / f"{who}.notes", folder / f"{who}.py"
    before = [str(fleet.bin_dir / "lockstep")] if who == "lockstep" else []
    noter.write_text(NOTER.format(python=sys.executable, before=before, notes=str(notes)))
    noter.chmod(0o755)
    program = [sys.executable, "-S", "-E", "-c", PROGRAM, str(SECONDS)]
    if who == "lockstep":
        run([sys.executable, "-m", "lockstep_sweep", "--launcher", str(noter), "--folder", str(folder / "sweep"), "--seed", "1",
             "--param", "lr=log:1e-5:1", "--param", "hidden=logint:16:512", "--metric", "loss", "--regex", "loss=loss: (.*)",
             "--trials", str(total), "--", *program, "{lr}", "{hidden}"], count)
    else:
        run([sys.executable, str(PEERS / "python_sweep.py"), str(folder / "optuna.journal"), str(count), str(noter), *program], count)
    moments = [tuple(map(int, line.split())) for line in notes.read_text().splitlines()]
    if len(moments) != total:
        raise BenchmarkError(f"{CONTENDERS[who]} has run {len(moments)} trials, not {total}")
    last = moments[-count:]
    return [begin - end for (_, end), (begin, _) in zip(last, last[1:])]


def run(words, trials):
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=trials * TIMEOUT, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{words[:4]} ended with status {done.returncode}; it printed:\n"
                             f"{done.stdout.decode(errors='replace')[-2000:]}")

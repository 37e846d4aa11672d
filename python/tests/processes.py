"""Runs whole programs for a test, each with all that it starts, and leaves nothing of them."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import ranks

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
TIMEOUT = 2 * ranks.TIMEOUT  # each process imports torch, on few cores one after the other


def run_python(*arguments, **options) -> str:
    """What `python ARGUMENTS…` writes to stdout; see run_program."""
    return run_program(sys.executable, *arguments, **options)


def run_program(*command, environment=None, processes=1, cwd=None) -> str:
    """What the command writes to stdout, in `processes` processes with RANK and WORLD_SIZE if more than one.

    They have neither a launcher's variables nor a GPU, run in a folder that is not the repository, and fail the test
    with all their output if one fails or does not end in time.
    """
    ranks_of_it = [{"RANK": rank, "WORLD_SIZE": processes} if processes > 1 else {} for rank in range(processes)]
    return run_programs([(command, {**(environment or {}), **own}) for own in ranks_of_it], cwd=cwd)


def run_programs(programs, cwd=None) -> str:
    """The same of several commands at a time, each with variables of its own: [(command, environment)]."""
    base = {name: value for name, value in os.environ.items() if not ranks._of_a_launcher(name)}
    base |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    running = []
    try:
        for command, environment in programs:
            own = {name: str(value) for name, value in environment.items()}
            running.append(
                subprocess.Popen(
                    [str(word) for word in command], env={**base, **own}, cwd=cwd or PROGRAMS, text=True,
                    start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
            )
        return "".join(_finish(process) for process in running)
    finally:
        for process in running:
            _kill(process)


def _finish(process) -> str:
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        _kill(process)
        stdout, stderr = process.communicate()
        stderr += f"\nit hangs: {TIMEOUT} s are over"
    assert process.returncode == 0, f"{process.args} ended with {process.returncode}\n{stdout}\n--- stderr\n{stderr}"
    return stdout


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

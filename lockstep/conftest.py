"""Runs the same work under Lockstep and under PyTorch, for the tests that compare the two."""

import os
import re
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
import torch

TIMEOUT = 300
ATTEMPTS = 3
CRASH = re.compile(r"terminated with signal (SIG\w+)")


def run(command, environment, given=None):
    """The ended process, which has got `given` as its input; without, this process's."""
    command = [str(part) for part in command]
    stdin = None if given is None else subprocess.PIPE
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                          env={**os.environ, **environment}) as process:  # fmt: skip
        try:
            stdout, stderr = process.communicate(given, timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too, which hold its output open
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def results(output, world_size):
    """What the ranks saved in OUTPUT.rank."""
    return [torch.load(f"{output}.{rank}", weights_only=False) for rank in range(world_size)]


@pytest.fixture(scope="session")
def run_driver(bin_dir):
    """run_driver(name, *arguments, given=None, **environment): the process, which has succeeded with `given` as its input."""

    def start(name, *arguments, given=None, **environment):
        done = run([bin_dir / name, *arguments], environment, given)
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    return start


@pytest.fixture(scope="session")
def ask_driver(run_driver):
    """ask_driver(name, lines, *arguments): the driver's answer to each line, a line."""

    def ask(name, lines, *arguments):
        got = run_driver(name, *arguments, given="".join(f"{line}\n" for line in lines)).stdout.split("\n")[:-1]
        assert len(got) == len(lines), got
        return got

    return ask


@pytest.fixture(scope="session")
def run_lockstep(bin_dir):
    """run_lockstep(program, *arguments, output=..., world_size=..., **environment): the results by rank.

    With hosts=N the ranks are on N pretended hosts, the first ones on the first; skips the test without UCX.
    """

    def start(program, *arguments, output, world_size, hosts=1, **environment):
        command = [bin_dir / "lockstep", "run", "--nproc-per-node", world_size]
        if hosts > 1:
            host = f"LOCKSTEP_TEST_HOST=host-$((RANK * {hosts} / WORLD_SIZE))"
            command += [shutil.which("sh"), "-c", f'export {host}; exec "$@"', "sh"]
        done = run([*command, bin_dir / program, *arguments], environment)
        if hosts > 1 and done.returncode != 0 and "needs UCX" in done.stderr:
            pytest.skip("ranks on several hosts need UCX")
        assert done.returncode == 0, done.stderr[-4000:]
        return results(output, world_size)

    return start


@pytest.fixture(scope="session")
def run_pytorch():
    """run_pytorch(script, *arguments, output=..., world_size=..., **environment): the results by rank.

    The script is PyTorch with Gloo alone. It crashes now and then where many groups come and go; what is compared is
    what it computes, so it gets another chance, and the crash is a warning.
    """

    def start(script, *arguments, output, world_size, **environment):
        for attempt in range(1, ATTEMPTS + 1):
            done = run([sys.executable, "-W", "ignore", script, *arguments], environment)
            crash = CRASH.search(done.stderr)
            if done.returncode == 0 or not crash or attempt == ATTEMPTS:
                break
            warnings.warn(f"{script.name}: PyTorch was {crash[0]}; attempt {attempt} of {ATTEMPTS}", stacklevel=2)
        assert done.returncode == 0, done.stderr[-4000:]
        return results(output, world_size)

    return start

"""`lockstep run` forks the processes of a program that is linked with Lockstep from one that has loaded its libraries."""

import os
import pathlib
import signal
import time

import pytest
from agents import server_of
from support import HANG, wait_for_end

ONE_CORE = ("--cpu-list", min(os.sched_getaffinity(0)))  # more processes than cores are worth a server


def forked_processes(launcher, generation):
    """The pids of two ranks that say theirs, after so many starts."""
    one = r"\[rank \d\] {} forked\n"
    before = f"(?:{one.format('[0-9]+')}.*?)" * (2 * (generation - 1))
    found = launcher.wait_for(f"(?s){before}{one.format('([0-9]+)')}.*?{one.format('([0-9]+)')}")
    return [int(pid) for pid in found.groups()]


@pytest.mark.parametrize(
    "options, variables, how",
    [
        (ONE_CORE, {}, "forked"),
        ([*ONE_CORE, "--start-method", "fork"], {}, "forked"),
        ([*ONE_CORE, "--start-method=spawn"], {}, "executed"),
        (ONE_CORE, {"PET_START_METHOD": "spawn"}, "executed"),
        ([*ONE_CORE, "--virtual-local-rank"], {}, "executed"),
    ],
    ids=str,
)
def test_processes_are_forked_where_nothing_speaks_against_it(programs, options, variables, how):
    done = programs.run("lockstep", "run", "-n", 2, *options, "process_probe", "word", **variables)
    assert done.status == 0, done.text
    for rank in range(2):
        said = [line.removeprefix(f"[rank {rank}] ") for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert said[0] == how and f"variable RANK={rank}" in said and "word word" in said, done.text
        assert not [line for line in said if "LOCKSTEP_FORK_SERVER" in line], done.text
    programs.wait_until_gone()


def test_what_has_words_of_its_own_by_rank_is_executed(programs):
    done = programs.run("lockstep", "run", "-n", 2, *ONE_CORE, "process_probe", "${local_rank}")
    assert done.status == 0, done.text
    for rank in range(2):
        assert f"[rank {rank}] executed\n" in done.stdout and f"[rank {rank}] word {rank}\n" in done.stdout, done.text


def test_a_program_that_can_not_be_loaded_says_why(programs):
    """The server fails without a word; then each process does with its own."""
    program = programs.folder / "process_probe"
    program.write_bytes(pathlib.Path(programs.find("process_probe")).read_bytes().replace(b"libc10.so", b"libc1O.so"))
    program.chmod(0o755)
    done = programs.run("lockstep", "run", "-n", 2, *ONE_CORE, program)
    if done.status == 0:
        pytest.skip("this build's programs do not name libc10.so themselves")
    assert done.status == 1 and "libc1O.so" in done.stderr and "exitcode" not in done.stdout, done.text


@pytest.mark.usefixtures("agents_are_built")
def test_processes_that_start_again_are_forked_also_after_the_loss_of_the_server(programs):
    launcher = programs.start("lockstep", "run", "-n", 2, "--max-restarts", 3, "process_probe", "stay")
    for generation in (1, 2):
        pids = forked_processes(launcher, generation)
        os.kill(pids[0], signal.SIGKILL)
    pids = forked_processes(launcher, 3)
    [server] = server_of(launcher)
    os.kill(server, signal.SIGKILL)
    wait_for_end(server, time.monotonic() + HANG)
    os.kill(pids[1], signal.SIGKILL)
    forked_processes(launcher, 4)
    assert len(server_of(launcher)) == 1 and server_of(launcher) != [server]
    launcher.kill(signal.SIGINT)
    assert launcher.finish().status == 130
    programs.wait_until_gone()


@pytest.mark.usefixtures("agents_are_built")
def test_the_server_ends_with_its_launcher(programs):
    launcher = programs.start("lockstep", "run", "-n", 2, "--max-restarts", 1, "process_probe", "stay")
    forked_processes(launcher, 1)
    assert len(server_of(launcher)) == 1
    launcher.kill()
    programs.wait_until_gone()
    launcher.finish()

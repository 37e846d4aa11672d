"""The proof that a training survives: examples/resume.cc, killed at random moments, ends as if it had not been."""

import os
import random
import re
import signal
import time

import pytest

RANKS = 3
OPTIONS = ("--epochs", 4, "--samples", 120, "--batch-size", 4, "--step-milliseconds", 10)
ONE_LIFE = 0.7  # seconds from the ranks' first line to the last moment of a kill; an undisturbed run takes longer


def start(programs, folder, *more):
    command = ("lockstep", "run", "--nproc-per-node", RANKS, "resume", "--checkpoints", folder)
    return programs.start(*command, *OPTIONS, *more)


def ending(done) -> str:
    """The fingerprint of the weights."""
    assert done.status == 0, done.text
    assert "[rank 0] each sample once in each epoch: yes" in done.stdout, done.text
    return re.search(r"^\[rank 0\] weights: ([0-9a-f]{16})$", done.stdout, re.M)[1]


def kill_once(programs, folder, rank, moment):
    """Starts the program, and kills a rank when so many seconds have passed; how it ended, and whether by that."""
    job = start(programs, folder)
    pids = {r: int(job.wait_for(rf"\[rank {r}\] process (\d+)")[1]) for r in range(RANKS)}
    time.sleep(moment)
    try:
        os.kill(pids[rank], signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was faster
    return job.finish()


def undisturbed(programs, folder, known={}) -> str:
    """What a run that is left alone ends with; the same for all tests."""
    if not known:
        known["weights"] = ending(start(programs, folder / "undisturbed").finish())
    return known["weights"]


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_random_moments_it_ends_with_the_same_weights(programs, tmp_path, kills):
    expected = undisturbed(programs, tmp_path)
    dice = random.Random(kills)
    run, killed, resumed = 0, 0, 0
    while killed < kills:
        done = kill_once(programs, tmp_path / f"run{run}", killed % RANKS, dice.uniform(0, ONE_LIFE))
        if done.status == 0:  # it came to its end before; what it was killed for counts with another
            assert ending(done) == expected
            run += 1
            continue
        assert "SIGKILL" in done.stderr, done.text
        killed += 1
        resumed += any((tmp_path / f"run{run}").glob("step-*"))
    assert ending(start(programs, tmp_path / f"run{run}").finish()) == expected
    assert resumed > kills // 4, "most of the kills were too early to leave anything"


def test_a_signal_to_the_launcher_stops_it_with_the_status_for_another_try(programs, tmp_path):
    expected = undisturbed(programs, tmp_path)
    folder = tmp_path / "run"
    job = start(programs, folder)
    deadline = time.monotonic() + 60
    while not list(folder.glob("step-*")):  # it trains
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.kill(signal.SIGUSR1)
    done = job.finish()
    assert "stopped after step" in done.stderr and "the status is 75" in done.stderr, done.text
    assert done.status == 75, done.text
    assert ending(start(programs, folder, "--must-resume").finish()) == expected


def test_where_it_must_resume_it_does_not_begin_anew(programs, tmp_path):
    done = start(programs, tmp_path / "mistyped", "--must-resume").finish()
    assert done.status == 1, done.text
    assert f"resume: rank 0: there is no folder {tmp_path / 'mistyped'}" in done.stderr, done.text
    assert not (tmp_path / "mistyped").exists()

"""Tests of job.py, with ranks that are small Python programs."""

import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from benchmarks.driver.job import BenchmarkError, Job

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANK = """
import json, os, sys
pipe = os.environ["LOCKSTEP_BENCH_CHANNEL"] + "/" + os.environ["RANK"]
with open(pipe + ".commands") as commands, open(pipe + ".answers", "w", buffering=1) as answers:
    answers.write('{"ready": true}\\n')
    while (line := commands.readline()) and line != "quit\\n":
        if line.startswith("die"):
            sys.exit("rank " + os.environ["RANK"] + " had enough")
        answers.write(json.dumps({"line": line, "pid": os.getpid(), "rank": os.environ["RANK"]}) + "\\n")
"""


def start(ranks, program=RANK):
    return Job("test", ranks, [([sys.executable, "-c", program], {"RANK": str(rank)}) for rank in range(ranks)])


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_commands_and_a_quiet_end():
    job = start(2)
    answers = job.measure("all_reduce", 4096, 10, 1)
    assert [answer["line"] for answer in answers] == ["all_reduce 4096 10 1\n"] * 2
    assert [answer["rank"] for answer in answers] == ["0", "1"]
    assert [answer["rank"] for answer in job.measure("single", "large", 1, 0, ranks=[1])] == ["1"]
    directory = job.directory
    job.stop()
    assert [process.returncode for process in job.processes] == [0, 0]
    assert not os.path.exists(directory)


def test_long_answers_arrive_whole():
    job = start(1, RANK.replace('"pid"', '"much": list(range(50000)), "pid"'))
    assert job.measure("x", 0, 1, 0)[0]["much"] == list(range(50000))
    job.stop()


def test_a_rank_that_dies_is_reported_with_its_flush_at_exit():
    job = start(2)
    with pytest.raises(BenchmarkError, match=r"test ended with status 1 at 'die 0 1 0'(.|\n)*\[\d\] rank \d had enough"):
        job.measure("die", 0, 1, 0)
    job.kill()


def test_a_rank_that_cannot_start_leaves_no_process_behind():
    bad = 'import os, sys, time; sys.exit("no such thing") if os.environ["RANK"] == "1" else time.sleep(1000)'
    with pytest.raises(BenchmarkError, match="no such thing"):
        start(2, bad)


def test_a_rank_that_does_not_quit_is_ended_and_told(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.driver.job.QUIT_SECONDS", 0)
    job = start(1, RANK + "print('still here', flush=True)\nimport time; time.sleep(1000)")
    job.stop()
    assert job.processes[0].returncode == -signal.SIGTERM
    assert "test still ran 0 s after 'quit' and was ended by force; " in capsys.readouterr().err


def test_a_stubborn_rank_is_killed():
    job = start(1, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + RANK)
    pid = job.measure("x", 0, 1, 0)[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    job.kill()
    assert not is_running(pid)


def test_no_orphans_when_the_driver_is_killed():
    driver = textwrap.dedent(f"""
        import sys, time
        from benchmarks.driver.job import Job
        job = Job("test", 2, [([sys.executable, "-c", {RANK!r}], {{"RANK": str(rank)}}) for rank in range(2)])
        print(*[answer["pid"] for answer in job.measure("x", 0, 1, 0)], job.directory, flush=True)
        time.sleep(1000)
    """)
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    *pids, directory = process.stdout.readline().split()
    watched = [os.pidfd_open(int(pid)) for pid in pids]
    process.kill()
    process.wait()
    for pidfd in watched:
        # A pidfd becomes readable when its process ends.
        assert select.select([pidfd], [], [], 30)[0], "a rank outlived the driver"
        os.close(pidfd)
    shutil.rmtree(directory)

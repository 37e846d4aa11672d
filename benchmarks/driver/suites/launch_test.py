"""Tests of the suite `launch`: its figures, its table, and what it starts."""

import contextlib
import os
import pathlib
import random
import subprocess

import pytest

from benchmarks.driver import contenders, report, results, targets
from benchmarks.driver.suites import launch

hosts = contenders.hosts


class LaunchFleet:
    bin_dir = pathlib.Path("/bin")

    def __init__(self, allowed=True):
        self.allowed = allowed

    def say(self, text):
        pass

    def hosts(self, count, rate):
        if not self.allowed:
            raise hosts.NotAllowed("hosts need root")
        return hosts.PretendedHosts(count)


@pytest.fixture
def costs(monkeypatch):
    """Each start takes a second under torchrun, and less under ours."""
    seconds = {"lockstep": 0.25e9, "torchrun": 1e9, launch.NO_LAUNCHER: 0.2e9}
    for what in ("start", "kill_worker", "kill_agent", "cut_host"):
        monkeypatch.setattr(launch, what, lambda fleet, turn: seconds[turn.launcher])
    monkeypatch.setattr(launch, "in_a_row", lambda fleet, turn: ([2e8, 4e8, 2e8], 1, ["a file", 7]))
    used = {"lockstep": (20 << 20, 1.5e6), "torchrun": (300 << 20, 4e6)}
    monkeypatch.setattr(launch, "idle", lambda fleet, launcher: used[launcher])
    monkeypatch.setattr(launch, "torchrun", lambda: "/bin/torchrun")


def run(fleet):
    answer = results.Results(machine={})
    launch.launch(fleet, answer, 2, random.Random(1))
    return answer


def test_launchers_are_compared(costs):
    answer = run(LaunchFleet())
    for cell in ("start.1x2", "start.1x8", "start.2x1", "start.2x4", "worker.2x1"):
        for program in launch.PROGRAMS:
            assert answer.median(f"launch.{cell}.{program}.vs_torchrun") == pytest.approx(4)
    assert [target for target, *_ in targets.judge(answer)] == list(targets.LAUNCH_TARGETS)
    assert answer.median("launch.agent.2x1.cpp.lockstep") == 0.25e9
    text = report.report(answer, markdown=True)
    assert "| start, 8 workers on 1 host, C++ | 250 ms | 1000 ms | 200 ms | 4× " in text, text
    assert "| launcher killed, 2 workers on 2 hosts, Python over Gloo | 250 ms | - | - | " in text, text
    assert "| cable cut, 2 workers on 2 hosts, C++ | 250 ms | - | - | " in text, text
    assert "| 200 ms | 1 | 2 |" in text, text
    assert "| lockstep run | 20 MiB | 1.5 ms |" in text, text


def test_jobs_that_all_failed_have_no_time(costs, monkeypatch):
    monkeypatch.setattr(launch, "in_a_row", lambda fleet, turn: ([], 100, []))
    assert "| - | 100 | 0 |" in report.report(run(LaunchFleet()), markdown=True)


def test_what_other_programs_share_is_not_left_by_jobs(make_hosts, monkeypatch):
    net = make_hosts(2)
    others = pathlib.Path(f"/dev/shm/lockstep_test_of_launch_{os.getpid()}")

    class Job(contextlib.nullcontext):
        begin = 0

        def __init__(self, *_, **variables):
            super().__init__(self)
            others.touch()
            net.run(1, "touch", "/dev/shm/shared")
            (pathlib.Path(variables["TMPDIR"]) / "temporary").touch()

        def first_collectives(self):
            return {0: (5, 1)}

        def finish(self):
            pass

    monkeypatch.setattr(launch, "Running", Job)
    monkeypatch.setattr(launch, "IN_A_ROW", 2)
    try:
        answer = launch.in_a_row(LaunchFleet(), launch.Launch("lockstep", "cpp", (1, 1), net))
    finally:
        others.unlink(missing_ok=True)
    assert answer == ([5, 5], 0, ["temporary", "shared"])


def test_without_root_there_is_one_host(costs):
    answer = run(LaunchFleet(allowed=False))
    assert answer.skipped == ["hosts need root"]
    assert {name.split(".")[2] for name in answer.series if "idle" not in name} == {"1x2", "1x8"}
    assert answer.median("launch.idle.memory.torchrun") == 300 << 20


def test_what_an_idle_process_takes_is_read():
    assert launch.memory(os.getpid()) > 1 << 20 and launch.processor_time(os.getpid()) > 0
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in launch.helpers(os.getpid())


def test_both_launchers_get_the_same_options():
    net = hosts.PretendedHosts(2)
    fleet = LaunchFleet()
    ours, theirs = (launch.Launch(launcher, "cpp", (1, 1), net).commands(fleet, "/folder", ["--max-restarts", 1], ["--stay"])
                    for launcher in ("lockstep", "torchrun"))
    for commands in (ours, theirs):
        for words in commands:
            assert words[words.index("--nnodes") + 1] == "2" and words[-3:] == ["/bin/bench_launch", "/folder", "--stay"]
            assert words[words.index("--max-restarts") + 1] == "1"


def test_without_a_launcher_each_rank_is_told_its_place():
    fleet = LaunchFleet()
    net = hosts.PretendedHosts(2)
    ranks = launch.Launch(launch.NO_LAUNCHER, "cpp", (2, 1), net, port=7).commands(fleet, "/folder")
    told = [dict(word.split("=") for word in words if "=" in word) for words in ranks]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in told] == [
        ("0", "0", "2"), ("1", "1", "2"), ("2", "0", "1")]
    assert {(rank["WORLD_SIZE"], rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in told} == {("3", net.addresses[0], "7")}
    assert all(words[-2:] == ["/bin/bench_launch", "/folder"] for words in ranks)

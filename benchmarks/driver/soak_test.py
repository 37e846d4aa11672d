"""Tests of the suite `soak`: how it judges what ranks were told, its table, and how it ends."""

import json
import os
import random
import select
import signal
import subprocess
import sys

import pytest

from benchmarks.driver import contenders, report, results, soak
from benchmarks.driver.__main__ import main, parse
from benchmarks.driver.suites_test import FakeFleet

SECOND = 1_000_000_000
ENDED = "all_reduce (sequence 4, …) failed on rank 0 of group 'default': rank 1 (pid 101) was killed by signal 9 (SIGKILL)"


def lane(error="", **changes):
    return {"state": "compared", "call": "all_reduce", "error": error, "again": "", "after_ns": 3_000_000, "watched": 4096,
            "changed": 0, **changes}


def played(failure="kill", error=ENDED, calls="collectives", seed=5, victim_call="barrier", **changes):
    """A round of two ranks, in which rank 1 fails and rank 0 is told `error`."""
    victim = {"rank": 1, "pid": 101, "member": True, "expects_error": False, "end": "signal 9", "output": "",
              "lanes": [lane(state="running", call=victim_call)]}
    survivor = {"rank": 0, "pid": 100, "member": True, "expects_error": True, "end": "exit 0", "output": "",
                "lanes": [lane(error, **changes)]}
    return {"seed": seed, "victim": 1, "failure": failure, "calls": calls, "memory": "shared", "size": "small", "steps": 3,
            "struck": True, "timeout_ns": SECOND, "ranks": [survivor, victim]}


@pytest.mark.parametrize("failure, error, how", [
    ("kill", ENDED, True),
    ("kill", "rank 1 (pid 101) ended without a note (_exit(), SIGKILL, out of memory, or another signal)", False),
    ("stop", "timed out after 1.5 s waiting for rank 1 (pid 101), which is stopped (by SIGSTOP, …)", True),
    ("stop", "rank 2 (pid 102) timed out waiting for rank 3 (pid 103), for which rank 1 (pid 101) is the cause", False),
    ("stop", "waiting for a message from any of ranks 1 and 2 (pid 101, 102), and rank 1 (pid 101) is stopped; a late …", True),
    ("abort", "the group had failed before: aborted by rank 1 (pid 101), by a call of abort() or by an exception there", True),
    ("operation", "the ranks called different operations: ranks 0 and 2: all_reduce(SUM, Float [3]); rank 1: barrier()", True),
    ("shape", "rank 0 sends 12 bytes to rank 1, which expects 16; each pair's split sizes must agree", True),
    ("dtype", "rank 1 sent 4 elements of Int", True),
    ("destroy", "rank 1 (pid 101) has left the group (destroyed it or ended) without this operation", True),
    ("exit", "aborted by rank 1 (pid 101), by a call of abort() or by an exception there", True),
    ("quick_exit", "rank 1 (pid 101) exited with status 4", True)])
def test_an_error_that_names_the_cause(failure, error, how):
    verdict = soak.judge(played(failure, error))
    assert (verdict.survivors, verdict.named, verdict.how, verdict.problems) == (1, 1, int(how), [])
    assert verdict.latencies == [3_000_000 - (SECOND if failure == "stop" else 0)]


@pytest.mark.parametrize("failure, error", [
    ("kill", "rank 2 (pid 102) was killed by signal 9 (SIGKILL)"),
    ("kill", "timed out after 60 s waiting for rank 1 (pid 101)"),
    ("stop", "timed out after 1.5 s waiting for rank 2 (pid 102); late were ranks 2 and 1 (pid 102, 101)"),
    ("stop", "waiting for a message from any of ranks 1 and 2 (pid 101, 102); a late rank may be stopped, …"),
    ("stop", "rank 0 timed out; a late rank may be stopped"),
    ("abort", "aborted by rank 2 (pid 102), by a call of abort() or by an exception there"),
    ("operation", "the ranks called different operations"),
    ("operation", "the ranks called different operations: ranks 1 and 2: barrier(); rank 0: all_reduce(SUM, Float [3])"),
    ("destroy", "rank 2 (pid 102) has left the group (destroyed it or ended) without this operation")])
def test_an_error_that_names_another_rank_or_none(failure, error):
    verdict = soak.judge(played(failure, error))
    assert (verdict.survivors, verdict.named) == (1, 0)
    assert len(verdict.problems) == 1 and "does not name rank 1 as the cause" in verdict.problems[0]


def test_what_else_is_wrong():
    def problem(one):
        (text,) = soak.judge(one).problems
        return text

    assert "hangs" in problem(played(error="", state="running"))
    assert "was told nothing" in problem(played(error=""))
    assert "12 of 4096 bytes changed" in problem(played(changed=12))
    assert "a further call does not name rank 1" in problem(played(again="the group had failed before"))
    assert "came to no harm" in problem({**played(), "struck": False})
    crashed = played()
    crashed["ranks"][0].update(end="signal 11", output="Segmentation fault")
    assert "ended with signal 11: Segmentation fault" in problem(crashed)
    waiting = played()
    waiting["ranks"][0]["end"] = "running"
    assert soak.judge(waiting).hung == 1
    beside = played()
    beside["ranks"][0]["expects_error"] = False
    assert "has nothing to do with it" in problem(beside)
    # After a message that did not fit the group goes on.
    fitting = played("dtype", "rank 1 sent 4 elements of Int", calls="messages", again="the group had failed before")
    assert "does not go on" in problem(fitting)


def make_program(folder, rounds, then=""):
    """A bench_soak that answers with these rounds, whatever it is asked for."""
    program = folder / "bench_soak"
    lines = "\n".join(json.dumps(one) for one in rounds)
    program.write_text(f"#!{sys.executable}\nimport os, sys, time\nprint({lines!r}, flush=True)\n{then}\n")
    program.chmod(0o700)


def run(folder, rounds, seconds=None):
    fleet, answer = FakeFleet(), results.Results(machine={}, options={"seed": 5, "seconds": seconds})
    fleet.bin_dir = folder
    soak.soak(fleet, answer, rounds, random.Random(1))
    return answer


def test_table(tmp_path):
    make_program(tmp_path, [played(), played(seed=6, after_ns=5_000_000), played("stop", "waiting for rank 1 (pid 101)", seed=7,
                                                                          after_ns=SECOND + 2_000_000, changed=8)])
    answer = run(tmp_path, 3)
    assert answer.series["soak.kill.latency"]["rounds"] == [3_000_000, 5_000_000]
    text = report.report(answer, markdown=True)
    assert "| kill -9 | 2 | 2 | 2 | 2 | 0 | 0 | 4 ms | 4.8 ms | 4.98 ms | 5 ms |" in text, text
    assert "| SIGSTOP beyond the timeout | 1 | 1 | 1 | 0 | 0 | 8 | 2 ms |" in text, text
    assert "| scripts/bench soak --rounds 1 --seed 7 | stop of rank 1 in collectives (shared, small): rank 0, all_reduce: " \
           "8 of 4096 bytes changed after the error |" in text, text


def test_time_is_over(tmp_path):
    make_program(tmp_path, [played()] * 3, then="time.sleep(1000)")
    assert run(tmp_path, 3, seconds=0).series["soak.kill.survivors"]["rounds"] == [1]


def test_a_program_that_is_missing_or_fails(tmp_path):
    assert "soak is left out: there is no" in run(tmp_path, 1).skipped[0]
    make_program(tmp_path, [played()], then="sys.exit('no memory left')")
    with pytest.raises(soak.BenchmarkError, match="status 1(.|\n)*no memory left"):
        run(tmp_path, 1)


@pytest.mark.parametrize("one, status", [(played(), 0), (played(error=""), 4)])
def test_exit_status(tmp_path, monkeypatch, capsys, one, status):
    make_program(tmp_path, [one])
    output = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "soak", "--rounds", "1", "--seed", "5", "--bin", str(tmp_path),
                                      "--output", str(output)])
    assert main() == status
    assert results.load(output).options["seed"] == 5
    assert ("scripts/bench soak --rounds 1 --seed 5" in capsys.readouterr().out) == (status == 4)


def test_ctrl_c_shows_what_there_is_and_leaves_no_process_behind(tmp_path):
    make_program(tmp_path, [played(changed=8)], then="print('pid', os.getpid(), file=open(os.environ['SOAK_PID'], 'w')); time.sleep(1000)")
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    driver = subprocess.Popen([sys.executable, "-m", "benchmarks.driver", "--only", "soak", "--bin", str(tmp_path), "--output",
                               str(tmp_path / "results.json")], cwd=contenders.ROOT, env={**os.environ, "SOAK_PID": str(fifo)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pidfd = os.pidfd_open(int(fifo.read_text().split()[1]))
    assert any("round 1 FAILED" in line for line in driver.stdout)
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 130 and "interrupted" in err and "kill -9" in out, out + err
    assert select.select([pidfd], [], [], 0)[0], "bench_soak outlived the driver"
    os.close(pidfd)


def test_rounds_unless_told():
    assert parse(["--only", "soak"]).rounds > parse(["--only", "soak", "--quick"]).rounds > parse([]).rounds


@pytest.mark.long
def test_the_program_itself(bin_dir):
    assert not run(bin_dir, 30).options["failed_rounds"]

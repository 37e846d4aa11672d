"""Tests of the suite `soak`: how it judges what ranks were told, its table, and how it ends."""

import json
import os
import random
import select
import signal
import subprocess
import sys

import pytest

from benchmarks.driver import contenders, report, results
from benchmarks.driver.__main__ import main, parse
from benchmarks.driver.suites import soak
from benchmarks.driver.suites.suites_test import FakeFleet

SECOND = 1_000_000_000
ENDED = "all_reduce (sequence 4, …) failed on rank 0 of group 'default': rank 1 (pid 101) was killed by signal 9 (SIGKILL)"


def lane(error="", **changes):
    return {"state": "compared", "call": "all_reduce", "error": error, "again": "", "after_ns": 3_000_000, "watched": 4096,
            "changed": 0, **changes}


def played(failure="kill", error=ENDED, calls="collectives", seed=5, victim_call="barrier", **changes):
    """A round of two ranks, in which rank 1 fails and rank 0 is told `error`."""
    ends = {"kill": "signal 9", "exit": "exit 3", "quick_exit": "exit 4"}
    own = "compared" if failure not in (*ends, "exception") else "running"
    told = failure not in (*ends, "exception", "destroy") and not (calls == "messages" and failure in ("shape", "dtype"))
    victim = {"rank": 1, "pid": 101, "member": True, "expects_error": False, "end": ends.get(failure, "exit 0"), "output": "",
              "lanes": [lane("failed" if told else "", state=own, call=victim_call)]}
    survivor = {"rank": 0, "pid": 100, "member": True, "expects_error": True, "end": "exit 0", "output": "",
                "lanes": [lane(error, **changes)]}
    return {"seed": seed, "victim": 1, "failure": failure, "calls": calls, "memory": "shared", "size": "small", "steps": 3,
            "struck": True, "timeout_ns": SECOND, "patience_ns": 20 * SECOND, "ranks": [survivor, victim]}


@pytest.mark.parametrize("failure, error, how", [
    ("kill", ENDED, True),
    ("kill", "rank 1 (pid 101) ended without a note (_exit(), SIGKILL, out of memory, or another signal)", False),
    ("stop", "timed out after 1.5 s waiting for rank 1 (pid 101), which is stopped (by SIGSTOP, …)", True),
    ("stop", "rank 2 (pid 102) timed out waiting for rank 3 (pid 103), for which rank 1 (pid 101) is the cause", False),
    ("stop", "waiting for rank 3 (pid 103), for which rank 1 (pid 101) is the cause, which is stopped (by SIGSTOP, …)", True),
    ("stop", "waiting for rank 2 (pid 102), which waits for rank 1 (pid 101), which is stopped; a late rank may be …", True),
    ("stop", "waiting for a message from any of ranks 1 and 2 (pid 101, 102), and rank 1 (pid 101) is stopped; a late …", True),
    ("stop", "waiting for rank 2 (pid 102), and rank 1 (pid 101) is stopped; a late rank may be …", True),
    ("stop", "waiting for rank 2 (pid 102), which waits for rank 3 (pid 103), and rank 1 (pid 101) is stopped; a late …", True),
    ("abort", "the group had failed before: aborted by rank 1 (pid 101), by a call of abort() or by an exception there", True),
    ("operation", "the ranks called different operations: ranks 0 and 2: all_reduce(SUM, Float [3]); rank 1: barrier()", True),
    ("shape", "rank 0 sends 12 bytes to rank 1, which expects 16; each pair's split sizes must agree", True),
    ("dtype", "rank 1 sent 4 elements of Int", True),
    ("destroy", "rank 1 (pid 101) has left the group (destroyed it or ended) without this operation", True),
    ("exit", "aborted by rank 1 (pid 101), by a call of abort() or by an exception there", True),
    ("quick_exit", "rank 1 (pid 101) exited with status 4", True)])
def test_an_error_that_names_the_cause(failure, error, how):
    outcome = soak.judge(played(failure, error))
    assert (outcome.survivors, outcome.named, outcome.how, outcome.problems) == (1, 1, int(how), [])
    assert outcome.hung == 0 and outcome.latencies == [3_000_000 - (SECOND if failure == "stop" else 0)]


STOPPED = "rank 1 (pid 101) is stopped (by SIGSTOP, SIGTSTP or a debugger; kill -CONT 101 continues it)"


@pytest.mark.parametrize("failure, error, how", [
    ("kill", "joining the job failed on rank 0: rank 1 (pid 101) killed by signal 9 (SIGKILL)", True),
    ("kill", "rank 1 of 2 did not join within 5.001 s; see whether these processes were started", False),
    ("kill", "ranks 1 and 2 of 3 did not join within 5 s; see whether these processes were started", False),
    ("kill", "ranks 1, 2 and 4 of 5 did not join within 5 s; see whether these processes were started", False),
    ("quick_exit", "ranks 0-3 of 5 did not join within 5 s; see whether these processes were started", False),
    ("quick_exit", "ranks 0 and 1 of 3 did not join within 5 s; see whether these processes were started", False),
    ("quick_exit", "init_process_group failed on rank 0: rank 1 (pid 101) exited with status 4", True),
    ("stop", "rank 1 of 2 did not join within 1.5 s; see whether these processes were started", False),
    ("stop", f"ranks 1 and 2 of 3 did not join within 1.5 s; see whether these processes were started; {STOPPED}", True),
    ("stop", f"all 2 ranks came, but were not there together within 1.5 s: one gave up; {STOPPED}", True),
    ("stop", "making the process group failed on rank 0: timed out waiting for rank 1 (pid 101), which is stopped (…)", True)])
def test_an_error_of_the_meeting_that_names_the_cause(failure, error, how):
    at_timeout = failure == "stop" or soak.ABSENT in error
    outcome = soak.judge(played(failure, error, calls="init", after_ns=SECOND + 7 if at_timeout else 7))
    assert (outcome.survivors, outcome.named, outcome.how, outcome.problems) == (1, 1, int(how), [])
    assert outcome.latencies == [7]


@pytest.mark.parametrize("calls, failure, error", [
    ("init", "kill", "rank 2 of 3 did not join within 5 s; see whether these processes were started"),
    ("init", "kill", "ranks 0 and 2-4 of 5 did not join within 5 s; see whether these processes were started"),
    ("init", "kill", "init_process_group failed on rank 0: rank 2 (pid 102) left the job in good order"),
    ("init", "stop", "all 3 ranks came, but were not there together within 1.5 s: one gave up, or ended"),
    ("init", "stop", "rank 2 of 3 did not join within 1.5 s; rank 2 (pid 102) is stopped (by SIGSTOP, …)"),
    ("new_group", "kill", "rank 1 of 2 did not join within 5 s; see whether these processes were started")])
def test_an_error_of_the_meeting_that_names_another_rank_or_none(calls, failure, error):
    (problem,) = soak.judge(played(failure, error, calls=calls, after_ns=SECOND + 7)).problems
    assert "does not name rank 1 as the cause" in problem


@pytest.mark.parametrize("failure, error", [
    ("kill", "rank 2 (pid 102) was killed by signal 9 (SIGKILL)"),
    ("kill", "timed out after 60 s waiting for rank 1 (pid 101)"),
    ("stop", "timed out after 1.5 s waiting for rank 2 (pid 102); late were ranks 2 and 1 (pid 102, 101)"),
    ("stop", "waiting for a message from any of ranks 1 and 2 (pid 101, 102); a late rank may be stopped, …"),
    ("stop", "rank 0 timed out; a late rank may be stopped"),
    ("stop", "waiting for rank 1 (pid 101), which waits for rank 2 (pid 102), which is stopped; a late rank may be …"),
    ("stop", "waiting for rank 1 (pid 101), for which rank 2 (pid 102) is the cause, which is stopped (by SIGSTOP, …)"),
    ("stop", "waiting for rank 1 (pid 101), and rank 2 (pid 102) is stopped; a late rank may be …"),
    ("stop", "waiting for rank 2 (pid 102), which waits for rank 1 (pid 101), and rank 3 (pid 103) is stopped; a late …"),
    ("abort", "aborted by rank 2 (pid 102), by a call of abort() or by an exception there"),
    ("operation", "the ranks called different operations"),
    ("operation", "the ranks called different operations: ranks 1 and 2: barrier(); rank 0: all_reduce(SUM, Float [3])"),
    ("destroy", "rank 2 (pid 102) has left the group (destroyed it or ended) without this operation")])
def test_an_error_that_names_another_rank_or_none(failure, error):
    outcome = soak.judge(played(failure, error))
    assert (outcome.survivors, outcome.named, outcome.how) == (1, 0, 0)
    assert len(outcome.problems) == 1 and "does not name rank 1 as the cause" in outcome.problems[0]


def test_what_else_is_wrong():
    def problem(one):
        (text,) = soak.judge(one).problems
        return text

    assert "hangs" in problem(played(error="", state="running"))
    assert "was told nothing" in problem(played(error=""))
    assert "12 of 4096 bytes changed" in problem(played(changed=12))
    assert "a further call does not name rank 1" in problem(played(again="the group had failed before"))
    assert "a further call on the failed group succeeded" in problem(played(again=soak.SUCCEEDED))
    assert "came to no harm" in problem({**played(), "struck": False})
    crashed = played()
    crashed["ranks"][0].update(end="signal 11", output="Segmentation fault")
    assert "ended with signal 11 instead of exit 0: Segmentation fault" in problem(crashed)
    waiting = played()
    waiting["ranks"][0]["end"] = "running"
    assert soak.judge(waiting).hung == 1
    beside = played()
    beside["ranks"][0]["expects_error"] = False
    assert "has nothing to do with it" in problem(beside)
    # After a message that did not fit the group goes on.
    fitting = played("dtype", "rank 1 sent 4 elements of Int", calls="messages", again="the group had failed before")
    assert "does not go on" in problem(fitting)
    assert soak.judge(played("dtype", "rank 1 sent 4 elements of Int", calls="messages", again=soak.SUCCEEDED)).problems == []


def test_the_group_of_a_message_goes_on_for_its_sender_too():
    one = played("dtype", "rank 1 sent 4 elements of Int", calls="messages")
    one["ranks"][1]["lanes"][0]["again"] = "the group had failed before"
    assert "rank 1, barrier: the group does not go on" in soak.judge(one).problems[0]


MISMATCH = "the ranks called different operations: rank 0: all_reduce(SUM, Float [3]); rank 1: barrier()"


@pytest.mark.parametrize("failure, error, end, problem", [
    ("kill", ENDED, "exit 0", "ended with exit 0 instead of signal 9"),
    ("stop", "waiting for rank 1 (pid 101)", "signal 11", "ended with signal 11 instead of exit 0"),
    ("abort", "aborted by rank 1 (pid 101)", "signal 6", "ended with signal 6 instead of exit 0"),
    ("exception", "aborted by rank 1 (pid 101)", "exit 1", "ended with exit 1 instead of exit 0"),
    ("operation", MISMATCH, "signal 11", "ended with signal 11 instead of exit 0"),
    ("destroy", "rank 1 (pid 101) has left the group", "signal 6", "ended with signal 6 instead of exit 0"),
    ("exit", "rank 1 (pid 101) has left the group", "exit 0", "ended with exit 0 instead of exit 3"),
    ("quick_exit", "rank 1 (pid 101) exited with status 4", "signal 6", "ended with signal 6 instead of exit 4"),
    ("destroy", "rank 1 (pid 101) has left the group", "running", "still runs"),
    ("abort", "aborted by rank 1 (pid 101)", "running", "still runs")])
def test_how_the_victim_ends(failure, error, end, problem):
    one = played(failure, error)
    one["ranks"][1].update(end=end, output="its last words")
    outcome = soak.judge(one)
    assert outcome.problems == [f"rank 1 {problem}: its last words"]
    assert outcome.hung == (end == "running")


@pytest.mark.parametrize("failure, error", [("stop", "waiting for rank 1 (pid 101)"), ("operation", MISMATCH),
                                            ("abort", "aborted by rank 1 (pid 101)")])
def test_a_victim_that_goes_on_has_an_error_too(failure, error):
    one = played(failure, error)
    one["ranks"][1]["lanes"] = [lane("")]
    assert soak.judge(one).problems == ["rank 1, all_reduce: was told nothing"]
    one["ranks"][1]["lanes"] = [lane("failed", again=soak.SUCCEEDED)]
    assert soak.judge(one).problems == ["rank 1, all_reduce: a further call on the failed group succeeded"]
    # It hangs in its call.
    one["ranks"][1].update(end="running", lanes=[lane("", state="running")])
    outcome = soak.judge(one)
    assert outcome.hung == 1 and outcome.problems == ["rank 1, all_reduce: hangs", "rank 1 still runs: "]


@pytest.mark.parametrize("failure, error, after, problem", [
    ("kill", ENDED, 0, "had an error before the failure"), ("kill", ENDED, -5, "had an error before the failure"),
    ("kill", ENDED, 20 * SECOND + 1, "was told after 20.0 s only"),
    ("stop", "waiting for rank 1 (pid 101)", 21 * SECOND + 1, "was told after 20.0 s only")])
def test_an_error_too_early_or_too_late(failure, error, after, problem):
    outcome = soak.judge(played(failure, error, after_ns=after))
    assert len(outcome.problems) == 1 and problem in outcome.problems[0]
    assert (outcome.named, outcome.hung) == (1, int(after > 0))


@pytest.mark.parametrize("failure, error, after", [("kill", ENDED, 20 * SECOND), ("stop", "waiting for rank 1 (pid 101)", 1),
                                                   ("stop", "waiting for rank 1 (pid 101)", 21 * SECOND)])
def test_an_error_just_in_time(failure, error, after):
    outcome = soak.judge(played(failure, error, after_ns=after))
    assert (outcome.hung, outcome.problems) == (0, [])


def test_bytes_of_a_victim_that_has_left():
    one = played("destroy", "rank 1 (pid 101) has left the group")
    one["ranks"][1]["lanes"][0]["changed"] = 8
    outcome = soak.judge(one)
    assert outcome.changed == 8 and outcome.problems == ["rank 1, barrier: 8 of 4096 bytes changed after it had left"]


FAR = "rank 1 (pid 101 on host-b)"


def over_hosts(failure, error, **sequels):
    """The round of two ranks, on two hosts; how each has gone on."""
    one = {**played(failure, error), "host_of": [0, 1], "failpoint": "", "goes_on": True}
    for rank in one["ranks"]:
        rank["sequel"] = {"done": True, "size": 1, "bits": 7, "error": "", **sequels.get(f"rank_{rank['rank']}", {})}
    if failure == "cut":
        one["ranks"][1].update(expects_error=True, end="exit 0",
                               lanes=[lane("rank 0 (pid 100 on host-a) is lost: it was silent for 10 s")])
    return one


LOST = {"rank_1": {"size": 0, "error": "the store's host can't be reached"}}


@pytest.mark.parametrize("failure, error, sequels", [
    ("kill", f"{FAR} was killed by signal 9 (SIGKILL)", {}), ("brief_cut", f"{FAR} was killed by signal 9 (SIGKILL)", {}),
    ("cut", f"{FAR} is lost: it was silent for 10 s; its host is lost or the wire cut", LOST),
    ("cut", "waiting for ranks 1 and 2 (pid 101, 102 on host-b), which were silent for 10 s", LOST)])
def test_over_hosts(failure, error, sequels):
    one = over_hosts(failure, error, **sequels)
    if failure == "brief_cut":
        one["ranks"][1].update(end="signal 9", lanes=[lane("", state="running")])
    outcome = soak.judge(one)
    assert (outcome.named, outcome.how, outcome.problems) == (outcome.survivors, outcome.survivors, [])


@pytest.mark.parametrize("failure, error, sequels, problem", [
    ("kill", "rank 1 (pid 101) was killed by signal 9 (SIGKILL)", {}, "does not name rank 1"),
    ("kill", f"{FAR} was killed by signal 9", {"rank_0": {"size": 2}}, "rank 0 went on in a group of 2 instead of 1"),
    ("kill", f"{FAR} was killed by signal 9", {"rank_0": {"error": "no store"}}, "rank 0 did not go on: no store"),
    ("kill", f"{FAR} was killed by signal 9", {"rank_0": {"done": False}}, "rank 0 did not end shrink_group()"),
    ("cut", f"{FAR} was silent for 10 s", {}, "rank 1 went on in a group of 1 without the store"),
    ("cut", "rank 1 (pid 101 on host-c) was silent for 10 s", LOST, "does not name rank 1")])
def test_what_is_wrong_over_hosts(failure, error, sequels, problem):
    (found,) = soak.judge(over_hosts(failure, error, **sequels)).problems
    assert problem in found


@pytest.mark.parametrize("host_of, names", [([0, 1], 1), ([0, 1, 1], 1), ([0, 0], 0)])
def test_how_a_rank_ended_may_be_unknown_on_other_hosts_only(host_of, names):
    one = over_hosts("kill", f"{FAR} is lost: disconnected; its process has ended, its host is lost or the wire is cut")
    one["host_of"] = host_of
    if not names:
        one["ranks"][0]["lanes"][0]["error"] = one["ranks"][0]["lanes"][0]["error"].replace(FAR, "rank 1 (pid 101)")
    outcome = soak.judge(one)
    assert (outcome.named, outcome.how, len(outcome.problems)) == (names, 0, 1 - names)


@pytest.mark.parametrize("call, names", [("irecv from any rank", 1), ("irecv", 0)])
def test_a_lone_rank_that_is_stopped_is_unknown_to_receives_from_any_rank(call, names):
    one = over_hosts("stop", "timed out after 1.5 s")
    for rank in one["ranks"]:
        rank["lanes"][0]["call"] = call
    outcome = soak.judge(one)
    assert (outcome.named, outcome.how, len(outcome.problems)) == (names, 0, 1 - names)


def test_survivors_with_other_bits():
    one = over_hosts("kill", f"{FAR} was killed by signal 9")
    third = json.loads(json.dumps(one["ranks"][0]))
    third.update(rank=2, pid=102)
    one["ranks"].append(third)
    one["host_of"] = [0, 1, 0]
    third["lanes"][0]["error"] = one["ranks"][0]["lanes"][0]["error"]
    for rank in one["ranks"]:
        rank["sequel"]["size"] = 2
    assert soak.judge(one).problems == []
    third["sequel"]["bits"] = 8
    assert soak.judge(one).problems == ["survivors trained on to different bits"]


def make_program(folder, rounds, then=""):
    """A bench_soak that answers with these rounds, whatever it is asked for."""
    program = folder / "bench_soak"
    lines = "\n".join(json.dumps(one) for one in rounds)
    program.write_text(f"#!{sys.executable}\nimport os, sys, time\nprint({lines!r}, flush=True)\n{then}\n")
    program.chmod(0o700)


def run(folder, rounds, seconds=None, **where):
    fleet, answer = FakeFleet(), results.Results(machine={}, options={"seed": 5, "seconds": seconds, **where})
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
    # What was played is kept, and the round in which it ended has failed; what it had written of that is no round.
    make_program(tmp_path, [played()], then="print('{', end='', flush=True); sys.exit('no memory left')")
    for rounds, seed in ((3, "6"), (None, "6"), (1, "5")):
        answer = run(tmp_path, rounds)
        ((failed, (problem,)),) = answer.options["failed_rounds"].items()
        assert failed == seed and "ended with status 1" in problem and "no memory left" in problem
        assert answer.series["soak.kill.survivors"]["rounds"] == [1]


def start(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    return main()


@pytest.mark.parametrize("one, status", [(played(), 0), (played(error=""), 4)])
def test_exit_status(tmp_path, monkeypatch, capsys, one, status):
    make_program(tmp_path, [one])
    output = tmp_path / "results.json"
    only = ["--only", "soak", "--rounds", "1", "--seed", "5", "--bin", tmp_path, "--output", output]
    assert start(monkeypatch, *only) == status
    assert results.load(output).options["seed"] == 5
    assert ("scripts/bench soak --rounds 1 --seed 5" in capsys.readouterr().out) == (status == 4)


@pytest.mark.parametrize("failed, status", [({}, 1), ({"5": ["rank 0 hangs"]}, 4)])
def test_a_comparison_is_shown_whatever_failed(tmp_path, monkeypatch, capsys, failed, status):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path, speed, options in ((old, 2.0, {}), (new, 1.0, {"failed_rounds": failed})):
        figure = {"of": [], "better": "higher", "rounds": [speed] * 5}
        path.write_text(results.Results(machine={}, options=options, figures={"speed": figure}).to_json())
    assert start(monkeypatch, "--show", new, "--compare", old) == status
    assert "SLOWER" in capsys.readouterr().out
    make_program(tmp_path, [played(error="" if failed else ENDED)])
    assert start(monkeypatch, "--only", "soak", "--rounds", "1", "--bin", tmp_path, "--output", new, "--compare", old) \
        == (4 if failed else 0)
    assert "measured then, but not now: speed" in capsys.readouterr().out


def test_a_program_that_fails_leaves_its_results(tmp_path, monkeypatch, capsys):
    make_program(tmp_path, [played()], then="sys.exit('no memory left')")
    output = tmp_path / "results.json"
    assert start(monkeypatch, "--only", "soak", "--rounds", "3", "--seed", "5", "--bin", tmp_path, "--output", output) == 4
    out = capsys.readouterr().out
    assert "kill -9" in out and "scripts/bench soak --rounds 1 --seed 6" in out and "no memory left" in out, out
    assert results.load(output).series["soak.kill.survivors"]["rounds"] == [1]


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
    def rounds(*arguments):
        return parse(list(arguments)).soak_rounds

    assert rounds("--only", "soak") > rounds("--only", "soak", "--quick") > rounds() == parse([]).rounds
    assert rounds("--only", "soak", "--seconds", "600") is None and rounds("--seconds", "600") is None
    assert rounds("--only", "soak", "--seconds", "600", "--rounds", "7") == 7
    assert parse(["--seconds", "600"]).rounds == parse([]).rounds


def test_without_a_number_of_rounds_the_time_ends_it(tmp_path):
    make_program(tmp_path, [played()] * 3, then="assert sys.argv[1] == str(sys.maxsize)")
    answer = run(tmp_path, None, seconds=600)
    assert len(answer.series["soak.kill.survivors"]["rounds"]) == 3 and not answer.options["failed_rounds"]


def test_rounds_over_hosts_are_asked_for_and_named():
    assert (parse(["--hosts", "2"]).hosts, parse(["--cuts"]).cuts, parse([]).hosts) == (2, True, None)
    assert soak.again(5, soak.options_of_hosts({"hosts": 2})) == "scripts/bench soak --rounds 1 --seed 5 --hosts 2"
    assert soak.options_of_hosts({"hosts": None, "cuts": True}) == " --cuts" and soak.options_of_hosts({}) == ""


def test_the_wire_is_cut_and_healed_when_the_program_asks_for_it(tmp_path):
    heal, one = json.dumps({"wire": "heal"}), json.dumps(played())
    make_program(tmp_path, [{"wire": "cut"}], then=f"assert len(sys.argv) == 6 and input() == 'done'\nprint({heal!r}, flush=True)\n"
                 f"assert input() == 'done'\nprint({one!r})")
    answer = run(tmp_path, 1, cuts=True)
    if answer.skipped:
        pytest.skip(answer.skipped[0])
    assert answer.options["failed_rounds"] == {}


@pytest.mark.parametrize("left", ["file", "nothing"])
def test_what_is_left_over_is_a_failure(tmp_path, left):
    make_program(tmp_path, [played()],
                 then="open(os.environ['TMPDIR'] + '/left', 'w')" if left == "file" else "")
    problems = [problem for each in run(tmp_path, 1).options["failed_rounds"].values() for problem in each]
    assert problems == (["what is left when bench_soak has ended: left"] if left == "file" else [])


@pytest.mark.long
@pytest.mark.parametrize("where", [{}, {"hosts": 2}, {"cuts": True}])
def test_the_program_itself(bin_dir, where):
    answer = run(bin_dir, 30, **where)
    if answer.skipped:
        pytest.skip(answer.skipped[0])
    assert not answer.options["failed_rounds"]

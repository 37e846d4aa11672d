"""Tests of the rounds, the suites' figures, targets and report, with jobs that answer what they are told to."""

import random
import re

import pytest

from benchmarks.driver import collectives, interleave, report, results, targets, training

FAST = {"lockstep": 1_000, "gloo": 100_000, "mpi": 4_000}  # nanoseconds
STEP = {("cpp", "ddp"): 53, ("cpp", "alone"): 52, ("cpp", "single"): 40, ("cpp_keep", "ddp"): 52.5,
        ("cpp_keep", "alone"): 50, ("cpp_keep", "single"): 40, ("python", "ddp"): 80, ("python", "alone"): 55,
        ("python_keep", "ddp"): 78, ("python_keep", "alone"): 54}


class FakeJob:
    """Rank r needs `r` nanoseconds more than rank 0."""

    def __init__(self, kind, ranks, log):
        self.kind, self.ranks, self.log = kind, ranks, log

    def measure(self, operation, argument, iterations, warmup, ranks=None):
        self.log.append((self.kind, operation, argument, iterations))
        wall = STEP[self.kind, operation] * 1_000_000 if (self.kind, operation) in STEP else FAST.get(self.kind)
        answers = range(self.ranks) if ranks is None else ranks
        return [{"wall": [wall + rank] * iterations, "cpu": [2 * wall] * iterations} for rank in answers]


class FakeFleet:
    def __init__(self, missing=()):
        self.missing, self.log = missing, []

    def say(self, text):
        pass

    def why_not(self, kind):
        return f"{kind} is not here" if kind in self.missing else None

    def job(self, kind, ranks):
        return FakeJob(kind, ranks, self.log)


def run(suite, rounds=4, missing=()):
    fleet, answer = FakeFleet(missing), results.Results(machine={})
    suite(fleet, answer, rounds, random.Random(1))
    return answer, fleet


def test_each_round_has_every_contender_once_in_changing_order():
    log = []
    turns = [interleave.Turn(kind, FakeJob(kind, 2, log), "all_reduce", 4, seconds=1e-9) for kind in FAST]
    bursts = interleave.run_rounds(turns, 20, random.Random(1))
    assert all(len(bursts[kind]) == 20 for kind in FAST)
    played = [kind for kind, *_ in log[-60:]]
    orders = [tuple(played[i:i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == sorted(FAST) for order in orders)
    assert len(set(orders)) > 3


def test_a_turn_takes_the_time_it_was_given_within_its_bounds():
    def count(kind, seconds):
        log = []
        turn = interleave.Turn("x", FakeJob(kind, 2, log), "all_reduce", 4, seconds=seconds, least=4, most=400)
        return interleave.calibrate(turn)

    assert count("gloo", 0.01) == 99  # of 100,001 ns, the slower rank's
    assert count("gloo", 0) == 4
    assert count("lockstep", 1) == 400


def test_all_reduce_figures():
    answer, _ = run(collectives.all_reduce)
    assert answer.median("all_reduce.2.4KiB.gloo") == 100_001  # the slowest rank's
    assert answer.median("all_reduce.2.4KiB.vs_gloo") == pytest.approx(100_001 / 1_001)
    assert answer.median("all_reduce_staged.2.25MiB.vs_gloo") == pytest.approx(100_001 / 1_001)
    # Two ranks that use 2,000 ns each for 25 MiB.
    assert answer.median("all_reduce_cpu.2.25MiB.lockstep") == pytest.approx(4_000 / (25 << 20))
    assert answer.median("all_reduce_cpu.2.25MiB.vs_gloo") == pytest.approx(100)


def test_a_missing_peer_is_named_once_and_left_out():
    answer, _ = run(collectives.all_reduce, missing=["mpi"])
    assert answer.skipped == ["mpi is not here"]
    assert not any("mpi" in name for name in answer.series | answer.figures)
    assert [target.figure for target, _, _ in targets.judge(answer) if "mpi" in target.figure] == []
    assert "all_reduce 25MiB" in report.report(answer)


def test_barrier_percentiles():
    answer, _ = run(collectives.barrier)
    assert answer.median("barrier_p99.4.gloo") == 100_003
    assert answer.median("barrier_p50.2.vs_mpi") == pytest.approx(4_001 / 1_001)


def test_overhead_is_counted_against_the_better_baseline():
    answer, fleet = run(training.ddp)
    assert answer.median("step.2.large.cpp_ddp.over_baseline") == pytest.approx(1.06)
    assert answer.median("step.2.large.cpp_keep_ddp.over_baseline") == pytest.approx(1.05)
    assert answer.median("step.2.large.cpp_ddp.vs_python") == pytest.approx(80 / 53)
    assert answer.median("step.2.large.cpp_ddp.efficiency") == pytest.approx(40 / 53)
    text = report.report(answer)
    # 2 ranks x 128 samples in 53 ms; 2 x 40 / 53 times as fast as one process.
    assert re.search(r"C\+\+: DDP +53 ms +4830 +\+1.9 % +1.51x +75 %", text), text


def test_targets_are_judged_in_the_right_direction():
    answer = results.Results(machine={}, figures={
        "all_reduce.2.25MiB.vs_gloo": {"better": "higher", "rounds": [9, 9.5, 11]},
        "step.2.large.cpp_ddp.over_baseline": {"better": "lower", "rounds": [1.05, 1.02, 1.3]}})
    assert [(target.figure, met) for target, _, met in targets.judge(answer)] == [
        ("all_reduce.2.25MiB.vs_gloo", False), ("step.2.large.cpp_ddp.over_baseline", True)]
    text = report.promises(answer)
    assert re.search(r"9.5x +>= 10x +MISSED", text) and re.search(r"5.0 % +<= 8.0 % +met", text), text


def test_figures_are_ours():
    # --compare must not blame us for a slower peer alone: every figure has a series of ours in it.
    answer, _ = run(training.ddp)
    assert answer.figures and all(any(".cpp" in name for name in figure["of"]) for figure in answer.figures.values())


def test_every_target_is_measured_by_a_suite():
    answer, _ = run(collectives.all_reduce)
    for suite in (collectives.four_ranks, training.ddp):
        suite(FakeFleet(), answer, 4, random.Random(1))
    assert {target.figure for target in targets.TARGETS} <= answer.figures.keys()


@pytest.mark.parametrize("nanoseconds, text", [(None, "-"), (130, "130 ns"), (2_040, "2.04 us"), (347_000, "347 us"),
                                               (19_200_000, "19.2 ms"), (4_500_000_000, "4500 ms")])
def test_durations(nanoseconds, text):
    assert report.duration(nanoseconds) == text

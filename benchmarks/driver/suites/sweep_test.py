"""Tests of the suite `sweep`: real trials, which are few and short, and what is made of them."""

import random
import re

import pytest

from benchmarks.driver import report, results, targets
from benchmarks.driver.suites import sweep


class SweepFleet:
    def __init__(self, bin_dir):
        self.bin_dir = bin_dir

    def say(self, text):
        pass


def run(bin_dir=None, rounds=2):
    answer = results.Results(machine={})
    sweep.sweep(SweepFleet(bin_dir), answer, rounds, random.Random(1))
    return answer


@pytest.fixture
def few_trials(monkeypatch):
    pytest.importorskip("optuna")
    pytest.importorskip("lockstep_sweep")
    monkeypatch.setattr(sweep, "TRIALS", 4)
    monkeypatch.setattr(sweep, "SECONDS", 0.01)


def test_trials_run_in_turns_and_their_pauses_are_compared(bin_dir, few_trials):
    answer = run(bin_dir)
    assert answer.skipped == []
    for who in sweep.CONTENDERS:
        assert len(answer.series[f"sweep.pause.{who}"]["rounds"]) == 2 and answer.median(f"sweep.pause.{who}") > 0
    assert re.search(r"lockstep sweep +\d.* (ms|us)", report.report(answer))


def test_pauses_are_judged(few_trials, monkeypatch):
    took = {"lockstep": 30e6, "optuna": 45e6}
    monkeypatch.setattr(sweep, "pauses", lambda fleet, who, *rest: [took[who]])
    answer = run()
    assert [(target.figure, value, met) for target, value, met in targets.judge(answer)] == [
        ("sweep.pause.of_allowed", pytest.approx(0.6), True)]
    text = report.report(answer, markdown=True)
    assert "| lockstep sweep | 30 ms | 30–30 ms | 1.5× " in text, text


def test_without_optuna_it_is_left_out(monkeypatch):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda package: None)
    answer = run()
    assert not answer.series and "no package optuna" in answer.skipped[0]

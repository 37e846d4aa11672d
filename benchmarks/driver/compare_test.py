"""Tests of compare.py: changes are seen, noise is not."""

import random

import pytest

from benchmarks.driver import compare, results


def noisy(median, spread, seed, count=15):
    generator = random.Random(seed)
    return [median * (1 + spread * generator.uniform(-1, 1)) for _ in range(count)]


@pytest.mark.parametrize("better, after, outcome", [
    ("higher", 30, "slower"), ("higher", 70, "faster"), ("higher", 49, "same"),
    ("lower", 30, "faster"), ("lower", 70, "slower"), ("lower", 49, "same")])
def test_direction(better, after, outcome):
    seen = compare.change("x", noisy(50, 0.05, 1), noisy(after, 0.05, 2), better)
    assert seen.outcome == outcome
    assert seen.old == pytest.approx(50, rel=0.05) and seen.new == pytest.approx(after, rel=0.05)


def test_noise_hides_what_it_must_hide():
    assert compare.change("x", noisy(50, 0.01, 1), noisy(42, 0.01, 2), "higher").outcome == "slower"
    loud = compare.change("x", noisy(50, 0.6, 1), noisy(42, 0.6, 2), "higher")
    assert loud.outcome == "same" and loud.noise > 0.16


def test_same_distribution_is_rarely_called_slower():
    outcomes = [compare.change("x", noisy(50, 0.3, 2 * seed), noisy(50, 0.3, 2 * seed + 1), "higher").outcome
                for seed in range(300)]
    assert outcomes.count("slower") <= 6


def test_equal_rounds_need_more_than_the_floor():
    assert compare.change("x", [100] * 3, [96] * 3, "higher").outcome == "same"
    assert compare.change("x", [100] * 3, [94] * 3, "higher").outcome == "slower"


def run(cpu, **figures):
    return results.Results(machine={"cpu": cpu},
                           figures={name: {"better": "higher", "rounds": rounds} for name, rounds in figures.items()})


def test_only_common_figures_are_compared():
    changes, notes = compare.compare(run("a", both=[9, 9], gone=[1]), run("b", both=[5, 5], new=[2]))
    assert [(change.name, change.outcome) for change in changes] == [("both", "slower")]
    assert notes == ["cpu differs: a then, b now", "measured then, but not now: gone"]

"""Tests of stats.py."""

import math
import random
import statistics

import pytest

from benchmarks.driver import stats

numpy = pytest.importorskip("numpy")


def test_percentile_is_numpys():
    generator = random.Random(1)
    for count in (1, 2, 3, 10, 101):
        values = [generator.random() for _ in range(count)]
        for percent in (0, 1, 25, 50, 99, 100):
            assert stats.percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_percentile_refuses_nonsense():
    with pytest.raises(ValueError, match="no values"):
        stats.percentile([], 50)
    with pytest.raises(ValueError, match="101"):
        stats.percentile([1], 101)


def test_summary():
    assert stats.summarize([5, 1, 2, 4, 3]) == stats.Summary(median=3, low=2, high=4, count=5)


def test_ratios_are_paired_by_round():
    # The machine is ten times slower in round 2; the ratio does not see it.
    assert stats.paired_ratios([10, 100, 10], [2, 20, 2]) == [5, 5, 5]
    with pytest.raises(ValueError, match="2 rounds cannot be paired with 1"):
        stats.paired_ratios([1, 2], [1])


def test_slowest_rank():
    assert stats.slowest_rank([[1, 5, 2], [3, 4, 2]]) == [3, 5, 2]
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        stats.slowest_rank([[1, 2], [1]])


def test_error_of_the_median_is_what_repetition_shows():
    generator = random.Random(2)
    samples = [[math.exp(generator.gauss(0, 0.1)) for _ in range(21)] for _ in range(500)]
    seen = statistics.stdev(math.log(statistics.median(sample)) for sample in samples)
    assert statistics.mean(stats.log_median_error(sample) for sample in samples) == pytest.approx(seen, rel=0.25)


def test_error_of_equal_rounds_is_zero():
    assert stats.log_median_error([2.0, 2.0, 2.0]) == 0

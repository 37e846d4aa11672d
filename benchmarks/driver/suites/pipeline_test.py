"""Tests of the suite `pipeline`: its figures and tables with pretended ranks, and the programs themselves."""

import random
import re

import pytest

from benchmarks.driver import contenders, report, results, targets
from benchmarks.driver.suites import pipeline
from benchmarks.driver.suites.suites_test import run


def test_pipelines_are_compared_with_theory_and_with_torch():
    answer, _ = run(pipeline.pipeline)
    for ranks in pipeline.RANKS:
        for schedule in pipeline.SCHEDULES:
            cell = f"pipeline.sleep.{ranks}.{schedule}"
            ours = 130 if schedule == "InterleavedZeroBubble" else 140
            assert answer.median(f"{cell}.over_theory") == pytest.approx(ours / 135)
            assert answer.median(f"{cell}.vs_gloo") == pytest.approx(160 / ours)
            assert answer.median(f"{cell}.vs_torch_on_ours") == pytest.approx(150 / ours)
        assert answer.median(f"pipeline.sleep.{ranks}.zero_bubble_of_1F1B") == pytest.approx(130 / 140)
    assert answer.median("pipeline.action.2.ours") == pytest.approx(140e6 / 16, rel=1e-3)
    assert answer.median("pipeline.memory.2.1F1B.of_gloo") == pytest.approx(0.5)
    for what in pipeline.OVER_HOSTS:
        assert answer.median(f"pipeline.hosts.{what}.1F1B.vs_gloo") == pytest.approx(160 / 140)
    assert answer.median("pipeline.hosts.wide.1F1B.over_theory") == pytest.approx(140 / 135)
    text = report.report(answer)
    assert re.search(r"512 KiB a micro-batch, 1F1B +140 ms +135 ms +160 ms +150 ms", text), text
    assert re.search(r"1F1B, 2 ranks +140 ms +135 ms +160 ms +150 ms +1.04x", text), text
    assert re.search(r"12 transformer layers, 1F1B, a step +140 ms +- +160 ms", text), text
    assert len(targets.judge(answer)) == 26 and all(met for _, _, met in targets.judge(answer))


def test_torch_on_lockstep_needs_the_package():
    answer, _ = run(pipeline.pipeline, missing=["python_pipeline_lockstep"])
    assert answer.skipped == ["python_pipeline_lockstep is not here"]
    assert "pipeline.sleep.2.1F1B.vs_gloo" in answer.figures and "pipeline.sleep.2.1F1B.vs_torch_on_ours" not in answer.figures
    answer, _ = run(pipeline.pipeline, missing=["pipeline"])
    assert not answer.series


@pytest.mark.long
def test_the_programs_themselves(bin_dir, monkeypatch):
    """One short round."""
    if not (bin_dir / "bench_pipeline").exists():
        pytest.skip("there is no bench_pipeline; scripts/bench builds it")
    monkeypatch.setattr(pipeline, "RANKS", (2,))
    monkeypatch.setattr(pipeline, "STEPS", 1)
    monkeypatch.setattr(pipeline, "ACTION_SECONDS", 0)
    answer = results.Results(machine={})
    with contenders.Fleet(bin_dir, lambda text: None) as fleet:
        pipeline.pipeline(fleet, answer, 1, random.Random(1))
    for schedule in pipeline.SCHEDULES:
        assert answer.median(f"pipeline.sleep.2.{schedule}.ours") > answer.median(f"pipeline.sleep.2.{schedule}.theory") * 0.9
        assert answer.median(f"pipeline.sleep.2.{schedule}.gloo") > 0
    assert "Pipelines on 2 ranks" in report.report(answer)
    if not answer.skipped:
        for what in pipeline.OVER_HOSTS:
            assert answer.median(f"pipeline.hosts.{what}.1F1B.vs_gloo") > 0

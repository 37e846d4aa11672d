"""Tests of the suite `sharding`: its figures and table with pretended ranks, and the programs themselves on small networks."""

import os
import random
import re

import pytest
import torch

from benchmarks.driver import contenders, job, report, results, sharding, targets
from benchmarks.driver.suites_test import MEMORY, run
from benchmarks.driver.training import Network

GIB = 1 << 30


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """As much as is wanted, whatever machine this runs on."""
    free = [64 * GIB]
    monkeypatch.setattr(sharding.machine, "available_memory", lambda: free[0])
    return free


def test_steps_and_memory_are_compared_within_a_run():
    answer, fleet = run(sharding.sharding)
    for network in sharding.NETWORKS:
        for ranks in (2, 4):
            cell, memory = (f"{what}.{ranks}.{network}" for what in ("sharding", "sharding_memory"))
            assert answer.median(f"{cell}.fsdp.vs_python") == pytest.approx(3)
            assert answer.median(f"{cell}.fsdp.vs_ddp") == pytest.approx(0.98)
            assert answer.median(f"{memory}.fsdp") == pytest.approx(MEMORY["sharding_fsdp"] * (ranks + 18) / 20)
            assert answer.median(f"{memory}.fsdp.of_python") == pytest.approx(0.8)
            assert answer.median(f"{memory}.fsdp.of_ddp") == pytest.approx(0.5)
        assert answer.median(f"sharding_memory.{network}.growth") == pytest.approx(1.1)
    assert answer.median("sharding_memory.2.huge.least") == 16 * 100_728_842
    assert "sharding.2.huge.alone" in answer.series and "sharding.4.huge.alone" not in answer.series
    assert all(met for _, _, met in targets.judge(answer)) and len(targets.judge(answer)) == 14
    assert fleet.stops == 5, "each network on each number of ranks has the memory to itself"
    text = report.report(answer)
    assert re.search(r"Python, fully_shard, Gloo +150 ms +3x \(3-3\) +2.56e\+03 MiB +0.8x \(0.8-0.8\)", text), text
    assert re.search(r"once +- +- +1.54e\+03 MiB +-", text), text


def test_what_is_missing_or_does_not_fit_is_left_out(memory):
    answer, _ = run(sharding.sharding, missing=["python_sharding"])
    assert answer.skipped == ["python_sharding is not here"]
    assert "sharding.2.huge.fsdp.vs_ddp" in answer.figures and "sharding.2.huge.fsdp.vs_python" not in answer.figures
    memory[0] = 8 * GIB
    answer, _ = run(sharding.sharding)
    assert len(answer.skipped) == 2 and all("the huge network, sharded on" in words for words in answer.skipped)
    assert "sharding.2.transformer_25m.fsdp" in answer.series and "sharding_memory.huge.growth" not in answer.figures


def test_memory_of_a_process():
    assert 1 << 20 < job.proportional_set_size(os.getpid()) < 1 << 36
    assert job.proportional_set_size(1 << 30) == 0


def test_numbers_of_parameters():
    width, layers, vocabulary = 512, 7, 2048
    with torch.device("meta"):
        encoder = torch.nn.TransformerEncoderLayer(width, 8, 4 * width)
    of_layer = sum(parameter.numel() for parameter in encoder.parameters())
    assert sharding.NETWORKS["transformer_25m"].parameters == layers * of_layer + 2 * vocabulary * width + vocabulary


@pytest.mark.long
def test_the_programs_themselves(bin_dir, monkeypatch):
    """One round each, of networks that are small."""
    if not (bin_dir / "bench_sharding").exists():
        pytest.skip("there is no bench_sharding; scripts/bench builds it")
    monkeypatch.setattr(sharding, "NETWORKS", {"small": Network(203_530, 64, seconds=0), "transformer": Network(2_630_144, 8, seconds=0)})
    monkeypatch.setattr(sharding, "RANKS", (1, 2))
    answer = results.Results(machine={})
    with contenders.Fleet(bin_dir, lambda text: None) as fleet:
        sharding.sharding(fleet, answer, 1, random.Random(1))
    assert not answer.skipped
    for network in sharding.NETWORKS:
        for name in sharding.CONTENDERS:
            assert answer.median(f"sharding.2.{network}.{name}") > 0
            assert answer.median(f"sharding_memory.2.{network}.{name}") > 1 << 20
        assert answer.median(f"sharding_memory.{network}.growth") > 0
    assert "Python, fully_shard, Gloo" in report.report(answer)

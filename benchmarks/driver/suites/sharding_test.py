"""Tests of the suite `sharding`: its figures and table with pretended ranks, and the programs themselves on small networks."""

import os
import random
import re

import pytest
import torch

from benchmarks.driver import contenders, job, report, results, targets
from benchmarks.driver.contenders import hosts
from benchmarks.driver.suites import sharding
from benchmarks.driver.suites.suites_test import MEMORY, FakeFleet, run
from benchmarks.driver.suites.training import Network

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("memory")


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
    assert fleet.stops == 10, "each network on each number of ranks, and each other part, has the memory to itself"
    text = report.report(answer)
    assert re.search(r"Python, fully_shard, Gloo +150 ms +3x \(3-3\) +2.56e\+03 MiB +0.8x \(0.8-0.8\)", text), text
    assert re.search(r"once +- +- +1.54e\+03 MiB +-", text), text


def test_forms_on_one_host_and_over_hosts():
    answer, fleet = run(sharding.sharding)
    for ranks in (2, 4):
        cell = f"sharding_forms.{ranks}.transformer_25m"
        assert answer.median(f"{cell}.fsdp.vs_gather") == pytest.approx(1.5)
        assert answer.median(f"{cell}.grad_op.vs_gather") == pytest.approx(1.25)
        assert answer.median(f"sharding_forms_memory.{ranks}.transformer_25m.gather.of_python") == pytest.approx(1.2)
    cell = "sharding_hosts.1gbit.2x2.transformer_25m"
    assert answer.median(f"{cell}.hybrid.vs_python_hybrid") == pytest.approx(3)
    assert answer.median(f"{cell}.full.vs_python_full") == pytest.approx(3)
    assert answer.median("sharding_hosts_memory.1gbit.2x2.transformer_25m.hybrid.of_python_hybrid") == pytest.approx(5 / 6)
    assert [answer.median(f"sharding_operator.{how}") for how in sharding.OPERATORS] == [1000, 1100, 1300]
    text = report.report(answer)
    assert re.search(r"gathered, FULL_SHARD +75 ms +1.5x \(1.5-1.5\) +- +3.38e\+03 MiB", text), text
    assert re.search(r"Python, fully_shard on each host, Gloo +120 ms +3x", text), text
    assert re.search(r"observed, given a gathered parameter +1300 ns +\+300 ns", text), text
    assert run(sharding.sharding, rounds=3)[1].log.count(("sharding_hybrid", "hybrid", "transformer_25m", 1)) == 1


def test_without_namespaces_hosts_are_left_out(monkeypatch):
    def refuse(self, count, rate):
        raise hosts.NotAllowed("no namespaces here")

    monkeypatch.setattr(FakeFleet, "hosts", refuse)
    answer, _ = run(sharding.sharding)
    assert answer.skipped == ["no namespaces here"] and "sharding_operator.plain" in answer.series
    assert not any("sharding_hosts" in name for name in answer.series)


def test_what_is_missing_or_does_not_fit_is_left_out(memory):
    answer, _ = run(sharding.sharding, missing=["python_sharding"])
    assert answer.skipped == ["python_sharding is not here"]
    assert "sharding.2.huge.fsdp.vs_ddp" in answer.figures and "sharding.2.huge.fsdp.vs_python" not in answer.figures
    memory[0] = 8 * GIB
    answer, _ = run(sharding.sharding)
    assert len([words for words in answer.skipped if "the huge network, sharded on" in words]) == 2
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
    monkeypatch.setattr(sharding, "FORMS_NETWORK", "transformer")
    monkeypatch.setattr(sharding, "HOSTS_NETWORK", "transformer")
    answer = results.Results(machine={})
    with contenders.Fleet(bin_dir, lambda text: None) as fleet:
        sharding.sharding(fleet, answer, 1, random.Random(1))
    assert not answer.skipped or "namespace" in answer.skipped[0]
    for network in sharding.NETWORKS:
        for name in sharding.CONTENDERS:
            assert answer.median(f"sharding.2.{network}.{name}") > 0
            assert answer.median(f"sharding_memory.2.{network}.{name}") > 1 << 20
        assert answer.median(f"sharding_memory.{network}.growth") > 0
    assert "Python, fully_shard, Gloo" in report.report(answer)

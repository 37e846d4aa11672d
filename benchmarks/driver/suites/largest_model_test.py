"""Tests of the largest model: the search, and the jobs themselves in a small memory."""

import os
import pathlib
import sys

import pytest

from benchmarks.driver import results
from benchmarks.driver.suites import largest_model


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 100, 1000])
def test_the_search_finds_the_largest(most):
    tried = []

    def trains(blocks):
        tried.append(blocks)
        return blocks <= most

    found = largest_model.largest(trains)
    assert found <= most and (most + 1) / largest_model.PRECISION <= found + 1
    assert len(tried) == len(set(tried)) <= 20


def test_the_groups_folder_is_found(tmp_path):
    own = tmp_path / "own"
    own.write_text("4:memory:/box/a\n0::/\n")
    (tmp_path / "memory/box/a").mkdir(parents=True)
    assert largest_model.folder_of_groups(tmp_path, own) == (tmp_path / "memory/box/a", "memory.limit_in_bytes")
    own.write_text("0::/\n")
    with pytest.raises(largest_model.NotAllowed, match="no control group that limits memory"):
        largest_model.folder_of_groups(tmp_path, own)
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    assert largest_model.folder_of_groups(tmp_path, own) == (tmp_path, "memory.max")


def test_what_is_missing_is_left_out(tmp_path):
    class Fleet:
        bin_dir, say = tmp_path, staticmethod(lambda text: None)

    answer = results.Results(machine={})
    largest_model.largest_model(Fleet, answer)
    assert answer.skipped == [f"the largest model is left out: there is no {tmp_path}/large_model"] and not answer.series


@pytest.mark.long
def test_a_limit_ends_what_takes_more():
    take = "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = bytes(len(held[::4096]))"
    try:
        assert largest_model.runs([sys.executable, "-c", take, str(10 << 20)], {}, limit=256 << 20)
    except largest_model.NotAllowed as reason:
        pytest.skip(str(reason))
    assert not largest_model.runs([sys.executable, "-c", take, str(1 << 30)], {}, limit=256 << 20)


@pytest.mark.long
def test_the_programs_themselves(bin_dir, monkeypatch):
    if not (bin_dir / "large_model").exists():
        pytest.skip("there is no large_model; scripts/bench builds it")
    monkeypatch.setattr(largest_model, "WIDTH", 64)
    tried = []

    def runs(command, environment):
        tried.append(command)
        return int(command[-1]) <= 2 and largest_model.subprocess.run(command, env={**os.environ, **environment}).returncode == 0

    monkeypatch.setattr(largest_model, "runs", runs)

    class Fleet:
        say = staticmethod(lambda text: None)

    Fleet.bin_dir = pathlib.Path(bin_dir)
    answer = results.Results(machine={})
    largest_model.largest_model(Fleet, answer)
    assert answer.median("sharding_largest.2.vs_python") == 1 and len(tried) == 6, answer
    assert answer.median("sharding_largest.2.lockstep") == largest_model.blocks_to_parameters(2)

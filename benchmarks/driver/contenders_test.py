"""Tests of contenders.py, and of the operations that the programs of all contenders know."""

import os
import re

import pytest

from benchmarks.driver import contenders
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites import collectives, several_hosts

FOLDER = contenders.ROOT / "benchmarks"


def operations_of(path, pattern):
    return set(re.findall(pattern, (FOLDER / path).read_text()))


def test_our_program_and_the_peers_know_every_operation():
    assert operations_of("collectives.cc", r'\{"(\w+)", \w+_case\}') == set(collectives.OPERATIONS)
    assert operations_of("peers/gloo_collectives.py", r'"(\w+)": self\.\1\b') == set(collectives.OPERATIONS)
    assert operations_of("peers/mpi_collectives.c", r'is_\w+ = strcmp\(operation, "(\w+)"\)') == {
        *collectives.MPI_OPERATIONS, "barrier"}


def test_our_programs_know_what_is_compressed_between_hosts():
    known = set(several_hosts.COMPRESSIONS)
    assert operations_of("collectives.cc", r'\{"_(\w+)", HostCompression::') == known
    assert operations_of("ddp_step.cc", r'name == "ddp_(\w+)"') == known


def test_each_rank_is_a_process_of_its_own_but_where_a_launcher_makes_them():
    ranks = contenders.processes("lockstep", 4, FOLDER)
    assert [environment["RANK"] for _, environment in ranks] == ["0", "1", "2", "3"]
    assert all(command[-1] == str(FOLDER / "bench_collectives") for command, _ in ranks)
    for kind in ("bare", "mpi"):
        assert len(contenders.processes(kind, 2, FOLDER)) == 1


def test_who_cannot_take_part_says_why(tmp_path, monkeypatch):
    fleet = contenders.Fleet(tmp_path, lambda text: None)
    assert "there is no" in fleet.why_not("lockstep") and str(tmp_path / "bench_collectives") in fleet.why_not("lockstep")
    with pytest.raises(BenchmarkError, match="scripts/bench builds it"):
        fleet.job("lockstep", 2)
    (tmp_path / "bench_flag_barrier").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert "needs two cores" in fleet.why_not("bare")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert fleet.why_not("bare") is None

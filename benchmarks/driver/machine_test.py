"""Tests of machine.py."""

import os

from benchmarks.driver import machine


def test_available_memory_is_bytes_of_this_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 20 < machine.available_memory() <= total


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.current").write_text(f"{3 << 20}\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free = machine.available_memory()
    (tmp_path / "memory.max").write_text(f"{8 << 20}\n")
    assert machine.available_memory() == 5 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() > 5 << 20 and free > 5 << 20

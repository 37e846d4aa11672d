"""Fixtures of the tests of suites."""

import pytest

from benchmarks.driver import machine


@pytest.fixture
def memory(monkeypatch):
    """As much as is wanted, whatever machine this runs on: its one element, in bytes."""
    free = [64 << 30]
    monkeypatch.setattr(machine, "available_memory", lambda: free[0])
    return free

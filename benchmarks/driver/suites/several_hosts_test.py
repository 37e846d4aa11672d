"""Tests of the suite `hosts`: its turns, figures and tables with pretended ranks, its peers on real namespaces over Gloo."""

import random
import re

import pytest

from benchmarks.driver import contenders, report, results, targets
from benchmarks.driver.contenders import hosts
from benchmarks.driver.interleave import QUICK_ROUNDS
from benchmarks.driver.job import Job
from benchmarks.driver.suites import several_hosts
from benchmarks.driver.suites.suites_test import FakeFleet, FakeJob

# Milliseconds for 25 MiB; small operations take as many microseconds.
TIMES = {("lockstep", "all_reduce"): 240, ("lockstep", "all_reduce_bf16"): 120, ("lockstep", "all_reduce_int8"): 80,
         ("gloo", "all_reduce"): 360, ("gloo", "slices"): 220, ("mpi", "all_reduce"): 480,
         ("wire", "exchange"): 220}
SMALL_TIMES = {"lockstep": 50, "gloo": 5000, "mpi": 100}


class HostsJob(FakeJob):
    def measure(self, operation, argument, iterations, warmup, ranks=None):
        if argument == "sleeping":
            wall = 480e6 + {1: 0, 2: 20e6, 4: 40e6, 8: 60e6}[self.ranks] * (2 if self.kind == "python" else 1)
        elif argument == "large":
            return super().measure(operation, argument, iterations, warmup, ranks)
        elif (self.kind, operation) in TIMES and argument > 5000:
            wall = TIMES[self.kind, operation] * 1e6
        else:
            wall = SMALL_TIMES[self.kind] * 1e3
        self.log.append((self.kind, operation, argument, self.ranks))
        return [{"wall": [wall] * iterations, "cpu": [wall / 10] * iterations} for _ in range(self.ranks)]


class HostsFleet(FakeFleet):
    def job(self, kind, ranks, place=None):
        return HostsJob(kind, ranks, self.log)


def run(missing=(), rounds=9):
    fleet, answer = HostsFleet(missing), results.Results(machine={})
    several_hosts.several_hosts(fleet, answer, rounds, random.Random(1))
    return answer, fleet


def test_figures():
    answer, fleet = run()
    for wire, layouts in several_hosts.LAYOUTS_ON.items():
        for layout in layouts:
            cell = f"hosts.{wire}.{layout}"
            assert answer.median(f"{cell}.25MiB.vs_gloo") == pytest.approx(1.5)
            assert answer.median(f"{cell}.25MiB.int8_vs_gloo") == pytest.approx(4.5)
            assert answer.median(f"{cell}.25MiB.vs_mpi") == pytest.approx(2)
            assert answer.median(f"{cell}.25MiB.of_wire") == pytest.approx(24 / 22)
            # Where no host has two ranks, or hosts have unequal numbers, there are no slices to compare with.
            assert (f"hosts_cpu.{wire}.{layout}.of_slices" in answer.figures) == layout.endswith("x2"), layout
        for small in ("4KiB", "barrier"):
            assert answer.median(f"hosts.{wire}.2x2.{small}.vs_gloo") == pytest.approx(100)
    assert answer.median("hosts_cpu.1gbit.2x2.lockstep") == pytest.approx(24e6)
    assert answer.median("hosts_step.1gbit.2x2.large.vs_python") == pytest.approx(80 / 53)
    assert answer.median("hosts_step.1gbit.2x2.large.int8_vs_python") == pytest.approx(2)
    assert answer.median("hosts_scaling.1gbit.8.lockstep.efficiency") == pytest.approx(480 / 540)
    assert fleet.stops == 5 + 2 + 2  # what is on the hosts ends before they do


def test_rounds():
    answer, _ = run(rounds=15)
    assert {name.partition(".")[0]: len(series["rounds"]) for name, series in answer.series.items()} == {
        "hosts": 10, "hosts_cpu": 10, "hosts_step": 10, "hosts_scaling": 5}
    answer, _ = run(rounds=QUICK_ROUNDS)
    assert {len(series["rounds"]) for series in answer.series.values()} == {3}
    assert {name.split(".")[2] for name in answer.series if name.startswith("hosts_scaling")} == {"1", "8"}
    # All that is promised is measured in a quick run, too.
    assert [target for target, *_ in targets.judge(answer)] == list(targets.HOST_TARGETS)


def test_every_rank_has_as_many_numbers_and_the_wire_what_has_to_pass_it():
    _, fleet = run()
    sizes = {(ranks, argument) for kind, operation, argument, ranks in fleet.log if operation == "all_reduce"}
    assert all(argument % (4 * ranks) == 0 for ranks, argument in sizes)
    assert {ranks: max(size for each, size in sizes if each == ranks) for ranks in (2, 3, 4, 8)} == {
        2: 25 << 20, 3: 26214396, 4: 25 << 20, 8: 25 << 20}
    assert {(ranks, argument) for kind, _, argument, ranks in fleet.log if kind == "wire"} >= {
        (2, 25 << 20), (4, 3 * (25 << 20) // 2)}


def test_tables_and_targets():
    answer, _ = run()
    text = report.report(answer)
    times = r"240 ms +120 ms +80 ms +360 ms +220 ms +480 ms +220 ms +219 ms"
    assert re.search(rf"2 hosts, 2\+2 ranks +{times}", text), text
    ratios = r"1.5x \(1.5-1.5\) +3x \(3-3\) +4.5x \(4.5-4.5\) +2x \(2-2\) +1.09x"
    assert re.search(rf"2 hosts, 2\+2 ranks +{ratios}", text), text
    assert re.search(r"2 hosts, 1\+3 ranks +240 ms +120 ms +80 ms +360 ms +- +480 ms +220 ms", text), text
    assert re.search(r"barrier, 2 hosts, 2\+2 ranks +50 us +5 ms +100 us +100x \(100-100\) +2x", text), text
    assert "A simulation (sleeping instead of computing" in text
    assert re.search(r"C\+\+, Lockstep, 8 ranks on 4 hosts +540 ms +14.81 +7.11x +88.9 %", text), text
    judged = {target.figure: met for target, _, met in targets.judge(answer)}
    assert set(judged) == {target.figure for target in targets.HOST_TARGETS}
    assert judged["hosts.1gbit.2x2.25MiB.vs_gloo"] and not judged["hosts_scaling.1gbit.8.lockstep.efficiency"]
    for table in report.report(answer, markdown=True).split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_without_open_mpi_the_others_are_measured():
    answer, _ = run(missing=["mpi"])
    assert answer.skipped == ["mpi is not here"]
    assert "hosts.1gbit.2x2.25MiB.vs_gloo" in answer.figures and not any("mpi" in name for name in answer.series)


def test_where_namespaces_are_not_allowed_the_suite_is_left_out():
    class Refused(HostsFleet):
        def hosts(self, count, rate):
            raise hosts.NotAllowed("hosts as network namespaces need root")

    fleet, answer = Refused(), results.Results(machine={})
    several_hosts.several_hosts(fleet, answer, 3, random.Random(1))
    assert answer.skipped == ["hosts as network namespaces need root"] and not answer.series and not fleet.log


def test_bound_of_the_wire():
    assert several_hosts.bound("1gbit", "2x2") == pytest.approx(219.3e6, rel=1e-3)
    assert several_hosts.bound("1gbit", "4x2") == pytest.approx(328.9e6, rel=1e-3)
    assert several_hosts.bound("unshaped", "2x2") is None


def test_ranks_meet_on_the_first_host_and_nothing_of_the_users_shell_says_otherwise():
    place = contenders.Place(hosts.PretendedHosts(2), (1, 2))
    ranks = contenders.processes_over_hosts("lockstep", place, contenders.ROOT, 29501)
    assert [environment["RANK"] for _, environment in ranks] == ["0", "1", "2"]
    for command, environment in ranks:
        assert environment["MASTER_PORT"] == "29501" and environment["GLOO_SOCKET_IFNAME"] == hosts.DEVICE
        undone = {command[i + 1] for i, word in enumerate(command) if word == "-u"}
        assert "LOCKSTEP_SOCKET_IFNAME" in undone and not undone & set(environment)
    assert [command[-2] for command, _ in ranks] == ["LOCKSTEP_TEST_HOST=host-a", *["LOCKSTEP_TEST_HOST=host-b"] * 2]


@pytest.fixture
def net():
    pytest.importorskip("torch")
    try:
        with hosts.Hosts(2) as made:
            yield made
    except hosts.NotAllowed as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind, layout, command", [
    ("gloo", (1, 1), ("all_reduce", 4096)), ("gloo", (2, 2), ("slices", 4096)), ("wire", (1, 1), ("exchange", 3 << 20))])
def test_the_peers_over_hosts(net, kind, layout, command):
    job = Job(kind, sum(layout), contenders.processes_over_hosts(kind, contenders.Place(net, layout), ".", contenders.hosts.PORT))
    try:
        answers = job.measure(*command, iterations=3, warmup=1)
        assert [len(answer["wall"]) for answer in answers] == [3] * sum(layout)
    finally:
        job.stop()
    assert [process.returncode for process in job.processes] == [0] * sum(layout)

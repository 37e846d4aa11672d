"""Tests of the suites `step`, `tuning` and `hooks`: their figures, targets and tables, with pretended ranks."""

import re

import pytest

from benchmarks.driver import contenders, interleave, report, results, targets
from benchmarks.driver.suites import comm_hooks, several_hosts, sharding, training, training_report
from benchmarks.driver.suites.suites_test import run

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("memory")


def test_overhead_is_counted_against_the_better_baseline():
    answer, _ = run(training.step)
    for ranks in (2, 4):
        cell = f"step.{ranks}.large"
        assert answer.median(f"{cell}.cpp_ddp.over_baseline") == pytest.approx(1.06)
        assert answer.median(f"{cell}.cpp_keep_ddp.over_baseline") == pytest.approx(1.05)
        assert answer.median(f"{cell}.cpp_ddp.over_abreast") == pytest.approx(53 / 51)
        assert answer.median(f"{cell}.cpp_ddp.over_default") == pytest.approx(53 / 52)
        assert answer.median(f"{cell}.cpp_ddp.vs_python") == pytest.approx(80 / 53)
        assert answer.median(f"{cell}.cpp_keep_ddp.vs_python_keep") == pytest.approx(78 / 52.5)
        assert answer.median(f"{cell}.cpp_ddp.efficiency") == pytest.approx(40 / 53)


def test_processor_time_of_communication_is_what_ddp_adds():
    answer, _ = run(training.step)
    # Twice the wall time: 2 x (53 - 52) ms and 2 x (80 - 55) ms.
    assert answer.median("step_cpu.2.large.cpp") == pytest.approx(2e6)
    assert answer.median("step_cpu.4.small.python") == pytest.approx(50e6)
    assert "step_cpu.2.huge.python" not in answer.series  # which has nothing to compare with


def test_hidden_share_is_the_mean_over_ranks():
    answer, _ = run(training.step)
    assert answer.median("step_hidden.2.large.cpp") == pytest.approx(0.75)
    assert answer.median("step_hidden.2.large.python") == pytest.approx((0.1 + 0.2) / 2)


def test_a_contender_that_tells_nothing_has_no_share():
    bursts = [interleave.measure(interleave.Turn("x", Silent(), "ddp", "large", 0), 1, warmup=1)]
    answer = results.Results(machine={})
    training.add_share(answer, "hidden", bursts, "backward_compute_comm_overlap_time", "backward_comm_time")
    training.add_facts(answer, "gradients", "bytes", bursts, "gradient_bytes")
    assert not answer.series
    assert training_report.gradients(answer).rows == []


class Silent:
    def measure(self, *_):
        return [{"wall": [1], "cpu": []}, {"wall": [1], "cpu": [], "facts": {"backward_comm_time": 0}}]


def test_step_table():
    text = report.report(run(training.step)[0])
    # 2 ranks x 128 samples in 53 ms; +1.9 % of 52 ms, +6 % of 50 ms, +3.9 % of 51 ms; 2 x 40 / 53 times as fast as one process.
    assert re.search(r"C\+\+: DDP +53 ms +4830 +\+1.9 % +\+6.0 % +\+3.9 % +2 ms +75 % +1.51x \(1.51-1.51\) +1.51x\n",
                     text), text
    assert re.search(r"C\+\+: one process alone +40 ms +3200 +1.00x\n", text), text
    assert re.search(r"transformer +4 MiB +75.0 %", text), text
    for title in ("huge network, 4 ranks, batch 32 a rank", "small network, 2 ranks, batch 64 a rank"):
        assert title in text


def test_what_fills_memory_is_measured_by_few_and_alone():
    answer, fleet = run(training.step, rounds=15)
    assert "step.2.huge.cpp_keep_ddp" not in answer.series and "step.2.huge.cpp_keep_alone" in answer.series
    assert len(answer.series["step.2.large.cpp_ddp"]["rounds"]) == 15
    assert len(answer.series["step.2.huge.cpp_ddp"]["rounds"]) == len(answer.series["step.4.small.cpp_ddp"]["rounds"]) == 5
    assert fleet.stops == 4  # before the huge network, and after each number of ranks


def test_memory_is_counted_before_it_is_taken(memory):
    # 100,728,842 parameters are 0.375 GiB; two ranks hold 8 times as much, four 6 times.
    memory[0] = 16 * GIB
    answer, _ = run(training.step)
    assert answer.skipped == ["the huge network on 4 ranks is left out: its 9.0 GiB are more than half of the 16.0 GiB of "
                              "memory that are free"]
    assert "step.2.huge.cpp_ddp" in answer.series and "step.4.huge.cpp_ddp" not in answer.series
    memory[0] = 4 * GIB
    answer, fleet = run(training.step)
    assert len(answer.skipped) == 2 and not any("huge" in name for name in answer.series)
    assert not any(network == "huge" for _, _, network, _ in fleet.log)


def test_figures_are_ours():
    # --compare must not blame us for a slower peer alone: every figure has a series of ours in it.
    for suite, ours in ((training.step, ".cpp"), (training.tuning, ".cpp_ddp"), (comm_hooks.hooks, "hooks_step")):
        answer, _ = run(suite)
        assert answer.figures and all(any(ours in name for name in figure["of"]) for figure in answer.figures.values())


def test_tuning():
    answer, _ = run(training.tuning)
    assert answer.median("tuning.2.huge.cpp_ddp.vs_fixed") == pytest.approx(54 / 53)
    assert [met for target, _, met in targets.judge(answer)] == [True] * 3
    text = report.report(answer)
    assert re.search(r"large +53 ms +54 ms +1.02x \(1.02-1.02\) +8 MiB +0.5 MiB", text), text


def test_a_bucket_for_everything_is_no_number():
    assert [training_report.cap(length) for length in (None, 25 << 20, (1 << 63) - 1)] == ["-", "25 MiB", "all"]


def test_hooks(tmp_path, monkeypatch):
    (tmp_path / "train-images-idx3-ubyte.gz").touch()
    monkeypatch.setattr(contenders, "DATA", tmp_path)
    answer, fleet = run(comm_hooks.hooks, rounds=9)
    assert answer.median("hooks_step.2.large.int8.vs_all_reduce") == pytest.approx(0.5)
    assert answer.series["hooks_accuracy.2.fashion_mnist.bf16"]["rounds"] == pytest.approx([0.8, 0.81, 0.82, 0.83, 0.84])
    # Each seed trains once with each hook.
    trained = [(operation, seed) for _, operation, seed, _ in fleet.log if operation.startswith("accuracy:")]
    assert sorted(trained) == sorted((f"accuracy:{hook}", seed) for hook in comm_hooks.HOOKS for seed in range(5))
    text = report.report(answer)
    assert re.search(r"int8 per tensor +100 ms +0.5x \(0.5-0.5\) +1 MiB +2 MiB +82.0 % \(80.0-84.0\)", text), text


def test_without_data_there_is_no_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "DATA", tmp_path)
    answer, fleet = run(comm_hooks.hooks)
    assert len(answer.skipped) == 1 and str(tmp_path) in answer.skipped[0]
    assert not any(operation.startswith("accuracy:") for _, operation, *_ in fleet.log)
    assert [row[-1] for row in training_report.hooks(answer).rows] == ["-"] * len(comm_hooks.HOOKS)


def test_programs_know_the_networks_and_hooks():
    folder = contenders.ROOT / "benchmarks"
    networks = re.findall(r'^ +\{"(\w+)",', (folder / "networks.h").read_text(), re.M)
    assert set(networks) == {*training.NETWORKS, *training.LANDING, *sharding.NETWORKS, several_hosts.SCALING_NETWORK}
    peers = (folder / "peers" / "python_ddp_step.py").read_text()
    assert set(re.findall(r'"(\w+)": \(\(', peers)) == {*training.NETWORKS, several_hosts.SCALING_NETWORK}
    hooks = (folder / "comm_hooks.cc").read_text()
    assert set(re.findall(r'^ +\{"(\w+)",', hooks, re.M)) == set(comm_hooks.HOOKS) == set(training_report.HOOKS)


@pytest.mark.parametrize("widths, name", [((784, 256, 10), "small"), ((1024, 2048, 2048, 10), "large"),
                                          ((*[4096] * 7, 10), "huge")])
def test_numbers_of_parameters(widths, name):
    assert training.NETWORKS[name].parameters == sum((a + 1) * b for a, b in zip(widths, widths[1:]))


def test_tables_have_as_many_cells_in_each_row():
    for suite in (training.step, training.tuning, comm_hooks.hooks):
        for table in training_report.tables(run(suite)[0]):
            assert all(len(row) == len(table.header) for row in table.rows), table

"""Tests of the suites `gpu` and `startup`: their figures and tables, and what they say where they can't run."""

import pathlib
import random
import sys

import pytest

from benchmarks.driver import contenders, report, results
from benchmarks.driver.__main__ import main
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites import gpu, startup
from benchmarks.driver.suites.suites_test import FakeFleet, FakeJob

# Milliseconds of a turn's iteration.
TIMES = {("gpu_nccl", "ddp"): 11, ("gpu_nccl", "alone"): 10, ("gpu_python_nccl", "ddp"): 22, ("gpu_staged", "ddp"): 30,
         ("gpu_staged", "alone"): 20, ("gpu_python_gloo", "ddp"): 90, ("gpu_staging", "all_reduce"): 16,
         ("gpu_staging", "copies"): 12}


class GpuFleet(FakeFleet):
    def __init__(self, device="cpu"):
        super().__init__()
        self.device = device

    def job(self, kind, ranks):
        return GpuJob(kind, ranks, self.log)


class GpuJob(FakeJob):
    def measure(self, operation, argument, iterations, warmup, ranks=None):
        wall = TIMES[self.kind, operation] * 1_000_000
        return [{"wall": [wall] * iterations, "cpu": [wall], "facts": {}} for _ in range(self.ranks)]


def run(suite, fleet, rounds=3):
    answer = results.Results(machine={})
    suite(fleet, answer, rounds, random.Random(1))
    return answer


def test_figures_of_a_card():
    answer = run(gpu.gpu, GpuFleet())
    for figure, value in {"gpu_step.1.large.over_alone": 1.1, "gpu_step.1.large.vs_python": 2,
                          "gpu_step.2.small.over_alone": 1.5, "gpu_step.2.small.vs_python": 3,
                          "gpu_staging.2.64MiB.of_bus": 0.75}.items():
        assert answer.median(figure) == pytest.approx(value), figure
    text = report.report(answer, markdown=True)
    assert "| large, 1 rank | 11 ms | 10 ms | 22 ms | 1.1× " in text, text
    assert "| 64 MiB | 16 ms | 12 ms | 0.75× " in text, text


def test_without_a_card_it_is_left_out_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "DEVICE_NODES", ("/dev/there-is-none",))
    answer = run(gpu.gpu, GpuFleet("cuda:0"))
    assert answer.series == {} and "needs a GPU" in answer.skipped[0]
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "gpu", "--output", "/dev/null"])
    assert main() == 3
    assert capsys.readouterr().err == "bench: the suite gpu needs a GPU: this machine has no device of NVIDIA's driver\n"


def environment_of(kind, device):
    (_, environment), *_ = contenders.processes(kind, 1, pathlib.Path("/bin"), device)
    return environment["LOCKSTEP_BENCH_BACKEND"], environment["LOCKSTEP_BENCH_DEVICE"]


def test_the_cpu_takes_a_cards_place():
    assert environment_of("gpu_nccl", "cuda:0") == ("nccl", "cuda:0")
    assert environment_of("gpu_nccl", "cpu") == ("lockstep", "cpu")
    assert environment_of("gpu_python_nccl", "cpu") == ("gloo", "cpu")
    assert environment_of("gpu_staged", "cuda:0") == ("lockstep", "cuda:0")


def test_time_and_memory_of_a_start(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys\nblock = bytearray(64 << 20)\nblock[::4096] = b'x' * len(block[::4096])\n"
                       "sys.exit(0 if sys.argv[1].endswith('rendezvous') else 1)\n")
    took, resident = startup.start([sys.executable, str(program)])
    assert took > 0 and 64 << 20 < resident < 256 << 20
    program.write_text("import sys\nprint('no such library')\nsys.exit(3)\n")
    with pytest.raises(BenchmarkError, match="(?s)status 3.*no such library"):
        startup.start([sys.executable, str(program)])


def test_starts_are_compared_with_ours(monkeypatch, tmp_path):
    for name in ("bench_startup", "bench_startup_cuda"):
        (tmp_path / name).touch()
    costs = {"bench_startup": (100e6, 150 << 20), "bench_startup_cuda": (300e6, 450 << 20), "python_startup.py": (900e6, 300 << 20)}
    monkeypatch.setattr(startup, "start", lambda words: costs[words[-1].rpartition("/")[2]])
    fleet = GpuFleet()
    fleet.bin_dir = tmp_path
    answer = run(startup.startup, fleet)
    assert answer.median("startup.time.vs_python") == pytest.approx(9)
    assert answer.median("startup.memory.vs_lockstep_cuda") == pytest.approx(3)
    assert "| C++, links Lockstep::cuda | 300 ms | 450 MiB | 3× " in report.report(answer, markdown=True)
    (tmp_path / "bench_startup_cuda").unlink()
    assert "is left out" in run(startup.startup, fleet).skipped[0]

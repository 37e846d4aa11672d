"""Tests of the rounds, the suites' figures, targets and report, with jobs that answer what they are told to."""

import contextlib
import random
import re

import pytest

from benchmarks.driver import interleave, report, results, tables, targets
from benchmarks.driver.__main__ import SUITES
from benchmarks.driver.suites import checkpoint, collectives, data, pipeline, profiler, sweep

FAST = {"lockstep": 1_000, "gloo": 100_000, "mpi": 4_000, "bare": 80}  # nanoseconds
# Milliseconds; processor time is twice as much.
STEP = {("cpp", "ddp"): 53, ("cpp", "fixed"): 54, ("cpp", "alone"): 52, ("cpp", "abreast"): 52.5,
        ("cpp", "single"): 40, ("cpp_keep", "ddp"): 52.5, ("cpp_keep", "alone"): 50, ("cpp_keep", "abreast"): 51,
        ("cpp_keep", "single"): 40, ("python", "ddp"): 80, ("python", "alone"): 55,
        ("python", "single"): 44, ("python_keep", "ddp"): 78, ("python_keep", "alone"): 54,
        ("cpp", "ddp_bf16"): 45, ("cpp", "ddp_int8"): 40, ("python_lockstep", "ddp"): 60,
        ("hooks", "step:all_reduce"): 50, ("hooks", "step:bf16"): 55,
        ("hooks", "step:fp16"): 60, ("hooks", "step:int8"): 100, ("hooks", "step:power_sgd"): 40,
        ("data", "memory:0"): 4, ("data", "memory:2"): 5, ("python_data", "memory:0"): 80,
        ("python_data", "memory:2"): 60, ("data", "jpeg:0"): 50, ("data", "jpeg:2"): 40, ("python_data", "jpeg:0"): 100,
        ("python_data", "jpeg:2"): 80, ("data", "parquet:1"): 20, ("python_data", "parquet:1"): 30,
        ("checkpoint", "save:nosync"): 100, ("checkpoint", "save:sync"): 200, ("checkpoint", "load:verify"): 50,
        ("checkpoint", "load:plain"): 40, ("checkpoint", "async:later"): 4,
        ("profiler", "add:off"): 5, ("profiler", "add:plain"): 8, ("profiler", "add:shapes"): 9, ("profiler", "add:memory"): 11,
        ("profiler", "add:stack"): 20, ("profiler", "add:flops"): 10, ("profiler", "export:plain"): 100,
        ("profiler", "export:stack"): 400, ("profiler", "merge:64"): 60_000,
        ("profiler", "phases"): 30, ("profiler", "scope"): 1, ("python_profiler", "scope"): 30,
        ("python_profiler", "add:off"): 10, ("python_profiler", "add:plain"): 16, ("python_profiler", "add:shapes"): 20,
        ("python_profiler", "add:memory"): 22, ("python_profiler", "add:stack"): 40, ("python_profiler", "add:flops"): 25,
        ("python_profiler", "export:plain"): 200, ("python_profiler", "export:stack"): 300,
        ("python_checkpoint", "torch_save:nosync"): 200, ("python_checkpoint", "torch_save:sync"): 300,
        ("python_checkpoint", "safetensors_save:nosync"): 80, ("python_checkpoint", "safetensors_save:sync"): 180,
        ("python_checkpoint", "torch_load:plain"): 60, ("python_checkpoint", "safetensors_load:plain"): 20}
STEP.update({("sharding_fsdp", "fsdp"): 50, ("sharding_ddp", "ddp"): 49, ("sharding_alone", "alone"): 45,
             ("python_sharding", "fsdp"): 150, ("sharding_gather", "gather"): 75, ("sharding_grad_op", "grad_op"): 60,
             ("sharding_hybrid", "hybrid"): 40, ("python_sharding_hybrid", "hybrid"): 120,
             ("sharding_gather", "operators:plain"): 10, ("sharding_gather", "operators:observed"): 11,
             ("sharding_gather", "operators:gathered"): 13})
STEP.update({(kind, schedule): time for schedule in pipeline.SCHEDULES
             for kind, time in (("pipeline", 140), ("python_pipeline", 160), ("python_pipeline_lockstep", 150))})
STEP["pipeline", "InterleavedZeroBubble"] = 130
MEMORY = {"sharding_fsdp": 2 << 30, "sharding_ddp": 4 << 30, "sharding_alone": 3 << 30, "python_sharding": 5 << 29,
          "sharding_gather": 3 << 30, "sharding_grad_op": 4 << 30, "sharding_hybrid": 5 << 30, "python_sharding_hybrid": 6 << 30,
          "pipeline": 1 << 30, "python_pipeline": 2 << 30, "python_pipeline_lockstep": 3 << 29}
FACTS = {"gradient_bytes": 4 << 20, "gradient_bytes_in_place": 3 << 20, "bucket_cap_bytes": 8 << 20,
         "first_bucket_cap_bytes": 1 << 19, "backward_comm_time": 800, "backward_compute_comm_overlap_time": 600}


def facts_of(kind, operation, argument, rank):
    """What ours and Python's DDP tell, and what is counted and trained with hooks. The argument of accuracy is a seed."""
    if operation in ("ddp", "fixed"):
        return FACTS if kind.startswith("cpp") else {**FACTS, "backward_compute_comm_overlap_time": 80 + 80 * rank}
    if kind == "pipeline":
        return {"actions": 16, "theory_ns": 135e6}
    if operation.startswith("save:"):
        return {"bytes_over_data": 1.0001}
    if operation.startswith("merge:"):
        return {"resident_bytes": 1 << 30, "bytes": 4 << 30}
    if operation.startswith("traffic:"):
        return {"input_bytes": 1 << 20, "output_bytes": 2 << 20}
    return {"accuracy": 0.8 + argument / 100} if operation.startswith("accuracy:") else {}


class FakeJob:
    """Rank r needs `r` nanoseconds more than rank 0. Of two backends in one job, the operation says which one works."""

    def __init__(self, kind, ranks, log):
        self.kind, self.ranks, self.log = kind, ranks, log

    def measure(self, operation, argument, iterations, warmup, ranks=None):
        self.log.append((self.kind, operation, argument, iterations))
        who = operation.partition(":")[0] if ":" in operation else self.kind
        wall = STEP[self.kind, operation] * 1_000_000 if (self.kind, operation) in STEP else FAST.get(who, 1)
        wall //= 2 if operation.endswith("_arena") else 1
        answers = range(self.ranks) if ranks is None else ranks
        return [{"wall": [wall + rank] * iterations, "cpu": [2 * wall] * iterations,
                 "facts": facts_of(self.kind, operation, argument, rank)} for rank in answers]


    def memory(self):
        return MEMORY[self.kind] * (self.ranks + 18) // 20


class FakeFleet:
    def __init__(self, missing=()):
        self.missing, self.log, self.stops = missing, [], 0

    def say(self, text):
        pass

    def why_not(self, kind):
        return f"{kind} is not here" if kind in self.missing else None

    def why_no_component(self, component):
        return f"{component} is not built" if component in self.missing else None

    def hosts(self, count, rate):
        return contextlib.nullcontext()

    def job(self, kind, ranks, place=None):
        return FakeJob(kind, ranks, self.log)

    def stop(self):
        self.stops += 1


def run(suite, rounds=4, missing=()):
    fleet, answer = FakeFleet(missing), results.Results(machine={})
    suite(fleet, answer, rounds, random.Random(1))
    return answer, fleet


def test_each_round_has_every_contender_once_in_changing_order():
    log = []
    turns = [interleave.Turn(kind, FakeJob(kind, 2, log), "all_reduce", 4, seconds=1e-9) for kind in FAST]
    bursts = interleave.run_rounds(turns, 20, random.Random(1))
    assert all(len(bursts[kind]) == 20 for kind in FAST)
    played = [kind for kind, *_ in log[-20 * len(FAST):]]
    orders = [tuple(played[i:i + len(FAST)]) for i in range(0, len(played), len(FAST))]
    assert all(sorted(order) == sorted(FAST) for order in orders)
    assert len(set(orders)) > 3


def test_a_turn_takes_the_time_it_was_given_within_its_bounds():
    def count(kind, seconds):
        log = []
        turn = interleave.Turn("x", FakeJob(kind, 2, log), "all_reduce", 4, seconds=seconds, least=4, most=400)
        return interleave.calibrate(turn)

    assert count("gloo", 0.01) == 99  # of 100,001 ns, the slower rank's
    assert count("gloo", 0) == 4
    assert count("lockstep", 1) == 400


def test_a_turn_that_one_iteration_fills_is_not_tried_for_longer():
    log = []
    turn = interleave.Turn("x", FakeJob("gloo", 2, log), "all_reduce", 4, seconds=50e-6, least=2)
    assert interleave.calibrate(turn) == 2
    assert [iterations for *_, iterations in log] == [1]


def test_a_turn_of_a_fixed_number_of_iterations_is_tried_once():
    log = []
    turn = interleave.Turn("x", FakeJob("gloo", 2, log), "all_reduce", 4, seconds=0, most=2, least=2)
    assert interleave.calibrate(turn) == 2
    assert [iterations for *_, iterations in log] == [1]


def test_all_reduce_figures():
    answer, _ = run(collectives.all_reduce)
    assert answer.median("all_reduce.2.4KiB.gloo") == 100_001  # the slowest rank's
    assert answer.median("all_reduce.2.4KiB.vs_gloo") == pytest.approx(100_001 / 1_001)
    assert answer.median("all_reduce.2.25MiB.arena_vs_gloo") == pytest.approx(100_001 / 501)
    assert answer.median("all_reduce.2.25MiB.arena_vs_mpi") == pytest.approx(4_001 / 501)
    # Two ranks that use 2,000 ns each for 25 MiB; half of it with tensors in the arena.
    assert answer.median("all_reduce_cpu.2.25MiB.lockstep") == pytest.approx(4_000 / (25 << 20))
    assert answer.median("all_reduce_cpu.2.25MiB.vs_gloo") == pytest.approx(100)
    assert answer.median("all_reduce_cpu.2.25MiB.arena_vs_gloo") == pytest.approx(200)


def test_a_missing_peer_is_named_once_and_left_out():
    answer, _ = run(collectives.all_reduce, missing=["mpi"])
    assert answer.skipped == ["mpi is not here"]
    assert not any("mpi" in name for name in answer.series | answer.figures)
    assert [target.figure for target, _, _ in targets.judge(answer) if "mpi" in target.figure] == []
    assert "all_reduce 25 MiB" in report.report(answer)


def test_barrier_percentiles():
    answer, _ = run(collectives.barrier)
    assert answer.median("barrier_p99.4.gloo") == 100_003
    assert answer.median("barrier_p50.2.vs_mpi") == pytest.approx(4_001 / 1_001)


def test_every_operation_is_measured_in_every_cell():
    answer, fleet = run(collectives.operations, rounds=15)
    cells = collectives.cells(answer)
    assert len(cells) == 12 * 5 * 2 + 2  # and the barriers
    assert len(answer.series["scatter.4.4KiB.gloo"]["rounds"]) == 5
    # Both of ours and the peer measure the same number of bytes.
    for operation in collectives.OPERATIONS:
        measured = {(kind, name): size for kind, name, size, _ in fleet.log if name in (operation, f"{operation}_arena")}
        assert set(measured) >= {("lockstep", operation), ("lockstep", f"{operation}_arena"), ("gloo", operation)}
        assert set(measured.values()) == {100 << 20}  # the last size
    assert {operation for kind, operation, *_ in fleet.log if kind == "mpi"} == {*collectives.MPI_OPERATIONS, "barrier"}
    assert fleet.stops == 2


def test_a_cell_that_another_suite_has_measured_is_not_measured_again():
    fleet, answer = FakeFleet(), results.Results(machine={})
    collectives.all_reduce(fleet, answer, 9, random.Random(1))
    fleet.log.clear()
    collectives.operations(fleet, answer, 9, random.Random(1))
    assert len(answer.series["all_reduce.2.25MiB.gloo"]["rounds"]) == 9
    assert len(answer.series["all_reduce.4.25MiB.gloo"]["rounds"]) == 3


def test_sizes_that_memory_does_not_hold_are_left_out_and_named(monkeypatch):
    monkeypatch.setattr(collectives.machine, "available_memory", lambda: 4 << 30)
    answer, _ = run(collectives.operations, missing=["mpi"])
    # 2 ranks x 8 tensors x 100 MiB are 1.6 GiB, less than half; 4 ranks' are 3.1 GiB.
    assert "gather.2.100MiB.vs_gloo" in answer.figures
    assert "gather.4.25MiB.vs_gloo" in answer.figures and "gather.4.100MiB.vs_gloo" not in answer.figures
    assert answer.skipped == ["mpi is not here", "100MiB on 4 ranks is left out: it takes more than half of the 4.0 GiB of "
                              "memory that are free"]


def test_latency_is_counted_in_bare_barriers():
    answer, _ = run(collectives.latency)
    assert answer.median("all_reduce.2.4B.over_bare_barrier") == pytest.approx(1_001 / 81)
    target, value, met = targets.judge(answer)[0]
    assert (target.figure, met) == ("all_reduce.2.4B.over_bare_barrier", True)
    answer, fleet = run(collectives.latency, missing=["bare"])
    assert answer.skipped == ["bare is not here"] and not answer.figures and not fleet.log


def with_cells(suites, **ratios):
    return results.Results(machine={}, options={"suites": suites}, figures={
        name.replace("__", "."): {"better": "higher", "rounds": [ratio]} for name, ratio in ratios.items()})


def test_promises_over_all_cells():
    ratios = {"reduce__2__4KiB__vs_gloo": 90, "scatter__4__1MiB__vs_gloo": 0.8, "barrier_p50__2__vs_gloo": 6,
              # No cells: another percentile, processor time, the arena, another peer.
              "barrier_p99__2__vs_gloo": 0.1, "all_reduce_cpu__2__25MiB__vs_gloo": 0.1, "scatter__4__1MiB__arena_vs_gloo": 3,
              "broadcast__2__1MiB__vs_mpi": 0.1}
    judged = {target.figure: (value, met) for target, value, met in
              targets.judge(with_cells(["barrier", "operations"], **ratios)) if target.figure in targets.OVER_CELLS}
    assert judged == {"cells.least": (0.8, False), "cells.median": (6, True)}
    overview = report.report(with_cells(["operations"], **ratios))
    assert re.search(r"plain tensors +3 +1 +6.00x +0.80x scatter, 1 MiB, 4 ranks; 6.00x barrier, 2 ranks; 90.0x", overview)
    # Of some cells alone nothing is promised.
    assert not {target.figure for target, *_ in targets.judge(with_cells(["barrier"], **ratios))} & set(targets.OVER_CELLS)
    assert targets.measured(with_cells(["operations"]), "cells.least") is None


def test_loading_is_told_in_samples_a_second(monkeypatch):
    made = []
    monkeypatch.setattr(data, "make", lambda fleet, source, path: made.append(source.maker))
    answer, fleet = run(data.data)
    assert made == ["", "jpeg_folder.py", "parquet_file.py"]
    assert answer.median("data.memory.0.vs_python") == pytest.approx(20)
    assert answer.median("data.memory.2.vs_python") == pytest.approx(12)
    assert answer.median("data.jpeg.2.vs_python") == pytest.approx(2)
    assert answer.median("data.parquet.1.vs_python") == pytest.approx(1.5)
    assert {argument for *_, argument, _ in fleet.log} == {source.samples for source in data.SOURCES.values()}
    table = report.report(answer)
    assert re.search(r"tensors in memory, 0 workers +4,096,000 +204,800 +20x", table), table
    answer, _ = run(data.data, missing=["python_data"])
    assert answer.skipped == ["python_data is not here"] and not answer.series
    answer, _ = run(data.data, missing=["image"])
    assert answer.skipped == ["JPEG folder: image is not built"]
    assert "data.jpeg.2.vs_python" not in answer.figures and "data.parquet.1.vs_python" in answer.figures


def test_checkpoints_are_compared_with_both_libraries():
    answer, fleet = run(checkpoint.checkpoint)
    assert answer.median("checkpoint.save.nosync.vs_torch") == pytest.approx(2)
    assert answer.median("checkpoint.save.sync.vs_safetensors") == pytest.approx(0.9)
    assert answer.median("checkpoint.load.verify.vs_torch") == pytest.approx(1.2)
    assert answer.median("checkpoint.async.of_sync") == pytest.approx(0.02)
    assert answer.median("checkpoint.bytes_over_data") == pytest.approx(1.0001)
    assert {argument for *_, argument, _ in fleet.log} == {checkpoint.MEBIBYTES}
    table = report.report(answer)
    assert re.search(r"save:nosync +100 ms +200 ms +2x .* +80 ms +0.8x", table), table
    assert re.search(r"as long as it holds up +4 ms", table), table
    answer, _ = run(checkpoint.checkpoint, missing=["python_checkpoint"])
    assert answer.skipped == ["python_checkpoint is not here"] and not answer.series


def test_profilers_are_compared_by_what_they_add():
    answer, _ = run(profiler.profiler)
    assert answer.median("profiler.plain.lockstep") == pytest.approx(3e6 / profiler.OPERATORS)
    assert answer.median("profiler.plain.vs_python") == pytest.approx(2)
    assert answer.median("profiler.export.vs_python") == pytest.approx(2)
    assert answer.median("profiler.export_stack.vs_python") == pytest.approx(0.75)
    assert answer.median("profiler.scope.vs_python") == pytest.approx(30)
    assert answer.median("profiler.flops.vs_python") == pytest.approx(3)
    assert answer.median("profiler.phases") == pytest.approx(6e7 / profiler.STEPS)
    assert answer.median("profiler.phases.of_allowed") == pytest.approx(0.6)
    assert answer.median("profiler.merge.memory_of_traces") == pytest.approx(0.25)
    table = report.report(answer)
    assert re.search(r"and profile_memory, adds +600 ns +1.2 us +2x", table), table
    assert re.search(r"a scope, not recorded +100 ns +3 us +30x", table), table
    assert re.search(r"record_shapes and with_flops, adds +500 ns +1.5 us +3x", table), table
    assert re.search(r"4.0 GiB +60000 ms +1.0 GiB", table), table
    answer, _ = run(profiler.profiler, missing=["python_profiler"])
    assert answer.skipped == ["python_profiler is not here"] and not answer.series


def test_markdown():
    answer, _ = run(collectives.operations)
    text = report.report(answer, markdown=True)
    assert "2 ranks, plain tensors: how many times faster than Gloo, and our time:\n\n|  | 4 KiB | 64 KiB |" in text
    assert "| all_to_all | 99.9×, 1 µs | " in text
    for table in text.split("\n\n"):
        lines = table.splitlines()
        assert len({line.count("|") for line in lines}) == 1, table  # as many columns in each row


def test_targets_are_judged_in_the_right_direction():
    answer = results.Results(machine={}, figures={
        "all_reduce.2.25MiB.arena_vs_gloo": {"better": "higher", "rounds": [9, 9.5, 11]},
        "step.2.large.cpp_ddp.over_baseline": {"better": "lower", "rounds": [1.03, 1.02, 1.3]}})
    assert [(target.figure, met) for target, _, met in targets.judge(answer)] == [
        ("all_reduce.2.25MiB.arena_vs_gloo", False), ("step.2.large.cpp_ddp.over_baseline", True)]
    text = tables.as_text(report.promises(answer))
    assert re.search(r"9.5x +>= 10x +MISSED", text) and re.search(r"3.0 % +<= 4.0 % +met", text), text


def test_every_target_is_measured_by_a_suite(monkeypatch):
    monkeypatch.setattr(collectives.machine, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda package: package)
    monkeypatch.setattr(sweep, "pauses", lambda *words: [1e6 * len(words[1])])
    answer = results.Results(machine={}, options={"suites": list(SUITES)})
    for name, suite in SUITES.items():
        if name in ("gpu", "launch", "largest", "startup", "soak"):  # they have tests of their own, where they promise anything
            continue
        suite(FakeFleet(), answer, 4, random.Random(1))
    own = set(targets.LAUNCH_TARGETS)
    assert [target for target, *_ in targets.judge(answer)] == [target for target in targets.TARGETS if target not in own]


@pytest.mark.parametrize("nanoseconds, text", [(None, "-"), (130, "130 ns"), (2_040, "2.04 us"), (347_000, "347 us"),
                                               (19_200_000, "19.2 ms"), (4_500_000_000, "4500 ms"),
                                               (-12_300, "-12.3 us")])
def test_durations(nanoseconds, text):
    assert tables.duration(nanoseconds) == text

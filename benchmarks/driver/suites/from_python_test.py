"""Tests of the suite `python`: its turns and figures with pretended ranks, its program with real ones over Gloo."""

import importlib.util
import random
import re
import sys

import pytest

from benchmarks.driver import contenders, report, results, targets
from benchmarks.driver.job import BenchmarkError, Job
from benchmarks.driver.suites import from_python
from benchmarks.driver.suites.suites_test import FakeFleet

STEPS = {"python_step.2.small.lockstep_ddp.vs_gloo": (80 / 60, False),
         "python_step.2.large.lockstep_ddp.vs_gloo": (80 / 60, True)}
COMMANDS = ("gloo:all_reduce", "gloo:all_reduce_async", "gloo:all_reduce_train")


def run(rounds=4, missing=()):
    fleet, answer = FakeFleet(missing), results.Results(machine={})
    from_python.python(fleet, answer, rounds, random.Random(1))
    return answer, fleet


def test_both_backends_have_their_turns_in_one_job():
    answer, fleet = run(rounds=9)
    collectives = [(kind, command) for kind, command, *_ in fleet.log if kind == "python_groups"]
    assert {command for _, command in collectives} == {f"{backend}:{form}" for backend in from_python.BACKENDS
                                                       for form in (*from_python.FORMS, "all_reduce_train")}
    for ranks in (2, 4):
        for size in from_python.SIZES:
            for form in from_python.FORMS:
                name, slowest = f"python_{form}.{ranks}.{size}.vs_gloo", ranks - 1
                assert len(answer.figures[name]["rounds"]) == 9
                assert answer.median(name) == pytest.approx((100_000 + slowest) / (1_000 + slowest))


def test_processor_time_is_that_of_all_ranks():
    answer, _ = run()
    assert answer.median("python_processor.4.64KiB.lockstep") == 4 * 2_000
    assert answer.median("python_processor.4.64KiB.vs_gloo") == pytest.approx(100)


def test_steps_differ_in_nothing_but_the_backends_name():
    assert contenders.KINDS["python"][0] == contenders.KINDS["python_lockstep"][0]
    ours, gloos = (contenders.processes(kind, 2, ".") for kind in ("python_lockstep", "python"))
    for (command, environment), (other_command, other_environment) in zip(ours, gloos):
        assert environment.pop("LOCKSTEP_BENCH_BACKEND") == "lockstep"
        assert environment == other_environment
        # The user's shell decides about neither: what is not set for a contender is undone for it.
        assert set(other_command) - set(command) == {"LOCKSTEP_BENCH_BACKEND"}


def test_step_figures_and_targets():
    answer, _ = run()
    assert answer.median("python_step.2.large.lockstep_ddp.over_alone") == pytest.approx(60 / 55)
    judged = {target.figure: (value, met) for target, value, met in targets.judge(answer)}
    for figure, (value, met) in STEPS.items():
        assert judged[figure] == (pytest.approx(value), met)
    assert {figure for figure in judged if figure.startswith("python_all_reduce.")} == {
        f"python_all_reduce.2.{size}.vs_gloo" for size in ("4B", "64B", "1KiB", "4KiB", "64KiB", "25MiB")}


@pytest.mark.parametrize("markdown", [False, True])
def test_tables(markdown):
    text = report.report(run()[0], markdown)
    for words in ("all_reduce from Python, 2 ranks", "all_reduce from Python, 4 ranks", "many in a row",
                  "Training step from Python, small network, batch 64",
                  "Training step from Python, large network, batch 128"):
        assert words in text
    if markdown:
        assert "| 4 B | 1 µs | 100 µs | 99.9× (99.9–99.9) | 1 µs | 100 µs | 99.9× (99.9–99.9) |" in text
    # 60 ms a step are 16.7 in a second; 60 / 55 of the step without communication; 80 / 60 of Gloo's rate.
    assert markdown or re.search(r"DDP, Lockstep +60 ms +16.7 +\+9.1 % +1.33x \(1.33-1.33\)", text)


def test_figures_are_ours():
    answer, _ = run()
    assert answer.figures and all("lockstep" in figure["of"][1] + figure["of"][0] for figure in answer.figures.values())


def test_without_the_package_the_suite_is_left_out():
    answer, fleet = run(missing=["python_groups"])
    assert answer.skipped == ["python_groups is not here"] and not answer.series and not fleet.log


def test_sizes_that_memory_does_not_hold_are_left_out(monkeypatch):
    monkeypatch.setattr("benchmarks.driver.suites.collectives.machine.available_memory", lambda: 2 << 30)
    answer, _ = run()
    # 2 ranks x 4 tensors x 100 MiB are 0.8 GiB, less than half; 4 ranks' are 1.6 GiB.
    assert "python_all_reduce.2.100MiB.vs_gloo" in answer.figures
    assert "python_all_reduce.4.25MiB.vs_gloo" in answer.figures
    assert "python_all_reduce.4.100MiB.vs_gloo" not in answer.figures


def test_a_folder_of_our_name_is_no_package(tmp_path, monkeypatch):
    fleet = contenders.Fleet(tmp_path, lambda text: None)
    monkeypatch.delitem(sys.modules, "lockstep", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "lockstep").mkdir()
    for kind in contenders.NEED_PACKAGE:
        assert "has no package lockstep (pip install ./python)" in fleet.why_not(kind)
    (tmp_path / "lockstep" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert {fleet.why_not(kind) for kind in contenders.NEED_PACKAGE} == {None}


@pytest.fixture(scope="module")
def pair():
    """Two ranks of the program, over Gloo alone: our package need not be there for it."""
    pytest.importorskip("torch")
    job = Job("pair", 2, contenders.processes("python_groups", 2, "."))
    yield job
    job.stop()
    assert [process.returncode for process in job.processes] == [0, 0]


def test_the_program_answers_each_operation(pair):
    for command in COMMANDS:
        answers = pair.measure(command, 4096, iterations=5, warmup=2)
        entries = 1 if command.endswith("train") else 5
        assert [len(answer["wall"]) for answer in answers] == [entries, entries]
        assert all(time > 0 for answer in answers for time in answer["wall"])
    assert [len(answer["cpu"]) for answer in pair.measure(COMMANDS[0], 1 << 20, 3, 1)] == [3, 3]


@pytest.mark.parametrize("command, argument, words", [
    ("gloo:nonesuch", 4, "'gloo:nonesuch' is no command; do: BACKEND:OPERATION"),
    ("all_reduce", 4, "'all_reduce' is no command"),
    (COMMANDS[0], 6, "the size is 6 bytes; it must be a multiple of 4"), (COMMANDS[0], 0, "the size is 0 bytes")])
def test_bad_commands(command, argument, words, monkeypatch):
    """Without ranks of their own: what the program checks comes before any communication."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(contenders.PEERS)
    spec = importlib.util.spec_from_file_location("python_all_reduce", contenders.PEERS / "python_all_reduce.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(program.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(program.dist, "get_world_size", lambda: 1)
    with pytest.raises(ValueError, match=re.escape(words)):
        program.Groups().measure(command, argument, 1, 0)


def test_a_wrong_result_is_an_error():
    pytest.importorskip("torch")
    spoiled = ("import sys, torch.distributed as dist; sys.argv = sys.argv[1:]; "
               "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); whole = dist.all_reduce; "
               "dist.all_reduce = lambda data, **options: (whole(data, **options), data[-1].zero_())[0]; "
               "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')")
    processes = [([*command[:-1], "-c", spoiled, command[-1]], environment)
                 for command, environment in contenders.processes("python_groups", 2, ".")]
    job = Job("spoiled", 2, processes)
    try:
        with pytest.raises(BenchmarkError, match=r"all_reduce gave 3.0 … 0.0 instead of 3.0"):
            job.measure(COMMANDS[0], 64, 2, 0)
    finally:
        job.kill()

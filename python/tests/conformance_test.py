"""PyTorch's own tests against our engine, and tests of the driver that runs them (python/conformance)."""

import ast
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import pytest

PYTHON = pathlib.Path(__file__).resolve().parents[1]
DRIVER = PYTHON / "conformance"
sys.path.append(str(PYTHON))  # at the end: the installed lockstep comes before its source

from conformance import case, document, lists, results, suites  # noqa: E402

QUICK_SECONDS, LONG_SECONDS = 900, 3600  # bounds for a hang; the runs take some minutes, and at most half an hour
SECONDS = 240  # the same for a run of the few tests below
DEADLINE = 15  # of each of them
RUN_ENDED = (0, 1)  # the driver's status when tests ran: gloo itself fails a few
BACKENDS = [word for backend in suites.BACKENDS for word in ("--backend", backend)]

# What distributed_test exercises on CPUs; each must be among the passed. It has no reduce_scatter without GPUs.
OPERATIONS = ("all_gather", "all_gather_coalesced_simple", "all_gather_object_default_pg", "all_reduce_sum",
              "all_reduce_coalesced_sum", "all_to_all_single_equal_split", "barrier", "batch_isend_irecv_gloo",
              "broadcast", "gather", "gather_object", "irecv", "isend", "monitored_barrier_gloo", "reduce_sum",
              "scatter", "scatter_object_list", "send_recv", "send_recv_any_source", "sparse_all_reduce_sum",
              "DistributedDataParallelCPU", "get_future")
# Tests of distributed_test that gloo passes with 4 ranks; fewer means that they did not really run.
LEAST_PASSED, LEAST_PASSED_QUICK = 120, 50

FAKE = """
    import os, pathlib, signal, subprocess, sys, unittest
    import torch, torch.distributed as dist
    from torch.testing._internal.common_distributed import MultiProcessTestCase, TEST_SKIPS

    class Fake(MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_passes(self):
            dist.init_process_group("gloo", init_method="file://" + self.file_name, rank=self.rank, world_size=2)
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            self.assertEqual(tensor.tolist(), [2, 2, 2])

        def test_fails(self):
            print("said by rank", self.rank)
            self.assertEqual(2 + 2, 5)

        def test_hangs(self):
            here = pathlib.Path(os.environ["FAKE_PIDS"])
            sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            for pid in (os.getpid(), os.getppid(), sleeper.pid):
                (here / str(pid)).touch()
            (here / f"ready-{self.rank}").touch()
            while True:
                signal.pause()

        def test_one_rank_fails_while_the_other_waits(self):
            if self.rank == 1:
                raise ValueError("rank 1 gives up")
            signal.pause()

        def test_second_rank_crashes(self):
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGSEGV)

        def test_second_rank_has_a_status_of_its_own(self):
            if self.rank == 1:
                os._exit(3)

        def test_test_process_vanishes(self):
            pass

        def test_needs_more_ranks(self):
            sys.exit(TEST_SKIPS["small_worldsize"].exit_code)

        def test_rank_skips(self):
            raise unittest.SkipTest("it is not the day for it")

        @unittest.skip("never")
        def test_skipped(self):
            pass

    class Plain(unittest.TestCase):
        def test_passes(self):
            self.assertTrue(dist.is_available())

        def test_process_ends(self):
            os._exit(0)

        def test_sub_tests(self):
            for number in (1, 2):
                with self.subTest(number=number):
                    self.assertEqual(number, 1)
"""
LEFT_OUT_ENTRY = '[[test]]\nname = "{name}"\nreason = "{reason}"\n'


def start_driver(*arguments, environment=None):
    return subprocess.Popen([sys.executable, str(DRIVER), *map(str, arguments)], text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})})


def finish(process, seconds):
    """(status, stdout, stderr) of the driver; terminated, with all that it started, if it hangs."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        stdout, stderr = process.communicate(timeout=60)
        pytest.fail(f"the driver hangs\n{stdout}\n{stderr}")
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def drive(*arguments, seconds=SECONDS, environment=None):
    return finish(start_driver(*arguments, environment=environment), seconds)


def is_alive(pid):
    """Whether the process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def pids_in(folder):
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


@pytest.fixture(scope="module")
def fake_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake") / "fake_tests.py"
    path.write_text(textwrap.dedent(FAKE))
    return path


@pytest.fixture(scope="module")
def fake_run(fake_file, tmp_path_factory):
    """(status, stdout, {name: entry}, folder with process ids) of all the tests above, two at a time."""
    folder = tmp_path_factory.mktemp("run")
    pids = folder / "pids"
    pids.mkdir()
    status, stdout, stderr = drive(
        "run", "--backend", "gloo", "--tests-from", fake_file, "--deadline", DEADLINE, "--jobs", 2,
        "--output", folder / "results.json", environment={"FAKE_PIDS": str(pids)})
    assert status == 1, stdout + stderr
    (run,) = json.loads((folder / "results.json").read_text())["runs"]
    return status, stdout, {entry["name"].removeprefix("fake_tests."): entry for entry in run["tests"]}, pids


@pytest.mark.parametrize("name, status, reason", [
    ("Fake.test_passes", "passed", "^$"),
    ("Fake.test_fails", "failed", "^AssertionError: Scalars are not equal!"),
    ("Fake.test_hangs", "timed out", f"^not done after {DEADLINE} s$"),
    ("Fake.test_one_rank_fails_while_the_other_waits", "failed", "^ValueError: rank 1 gives up$"),
    ("Fake.test_second_rank_crashes", "failed", "rank 1 was ended by SIGSEGV"),
    ("Fake.test_second_rank_has_a_status_of_its_own", "failed", "rank 1 ended with status 3, expected 0"),
    ("Fake.test_needs_more_ranks", "skipped", r"^Skipped due to small world size\.$"),
    ("Fake.test_rank_skips", "skipped", "^it is not the day for it$"),
    ("Fake.test_skipped", "skipped", "^never$"),
    ("Plain.test_passes", "passed", "^$"),
    ("Plain.test_process_ends", "failed", "^the test's process ended with status 0$"),
    ("Plain.test_sub_tests", "failed", "^AssertionError: 2 != 1$"),
])
def test_each_way_to_end_is_told(fake_run, name, status, reason):
    entry = fake_run[2][name]
    assert entry["status"] == status, entry
    assert re.search(reason, entry["reason"]), entry


def test_a_failure_keeps_what_its_ranks_wrote(fake_run):
    entry = fake_run[2]["Fake.test_fails"]
    assert re.search("said by rank [01]", entry["output"])  # whichever fails first ends the other
    assert "assertEqual(2 + 2, 5)" in entry["detail"]


def test_a_hanging_test_shows_where_it_hangs(fake_run):
    assert "in test_hangs" in fake_run[2]["Fake.test_hangs"]["output"]


def test_a_hanging_test_leaves_no_process(fake_run):
    pids = pids_in(fake_run[3])
    assert len(pids) == 5  # the test's process, two ranks, and a process of each in a session of its own
    assert [pid for pid in pids if is_alive(pid)] == []


def test_results_are_in_the_order_of_the_tests_however_many_run_at_a_time(fake_run):
    names = list(fake_run[2])
    assert names == sorted(names)


def test_an_interrupt_ends_all_processes(fake_file, tmp_path):
    process = start_driver("run", "--backend", "gloo", "--tests-from", fake_file, "--only", "test_hangs",
                           "--output", tmp_path / "results.json", "--deadline", SECONDS,
                           environment={"FAKE_PIDS": str(tmp_path)})
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        wait_until(lambda: {"ready-0", "ready-1"} <= set(os.listdir(tmp_path)), process)
        process.send_signal(signal.SIGINT)
        status, stdout, stderr = finish(process, SECONDS)
    assert status == 130, stdout + stderr
    assert "Traceback" not in stderr
    assert [pid for pid in pids_in(tmp_path) if is_alive(pid)] == []
    assert not (tmp_path / "results.json").exists()


def wait_until(condition, process):
    """Looks again and again, with the driver's end as the only thing worth waiting for in between."""
    for _ in range(SECONDS * 20):
        if condition():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            pytest.fail(f"the driver ended with status {process.returncode}: {process.stderr.read()}")
    pytest.fail("the test's ranks did not start")


@pytest.mark.parametrize("arguments, message", [
    (["--only", "no_such_thing"], "no test's name matches 'no_such_thing'"),
    (["--subset", "quick"], "none is chosen by --subset quick"),
])
def test_a_pattern_without_a_test_is_an_error(fake_file, arguments, message):
    status, stdout, stderr = drive("run", "--backend", "gloo", "--tests-from", fake_file, *arguments)
    assert status == 2, stdout + stderr
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_left_out_test_must_exist(fake_file, tmp_path):
    path = tmp_path / "left_out.toml"
    path.write_text(LEFT_OUT_ENTRY.format(name="fake_tests.Fake.test_gone", reason="gone"))
    status, _, stderr = drive("--left-out", path, "run", "--backend", "gloo", "--tests-from", fake_file)
    assert status == 2
    assert "names tests that do not exist: fake_tests.Fake.test_gone" in stderr


@pytest.mark.parametrize("arguments, message", [
    (["run", "--jobs", "0"], "--jobs"),
    (["run", "--world-size", "-1"], "--world-size"),
    (["run", "--deadline", "nan"], "--deadline"),
    (["run", "--backend", "mpi"], "--backend"),
    (["compare", "/nonexistent.json"], "cannot be read"),
    ([], "required"),
])
def test_misuse_is_told_in_one_line(arguments, message):
    status, _, stderr = drive(*arguments)
    assert status == 2
    assert message in stderr
    assert "Traceback" not in stderr


def entry_of(name, status="passed", reason=""):
    return {"name": name, "status": status, "reason": reason, "seconds": 0.5}


def run_of(backend, outcomes, world_size=4):
    """A Run from {name: status}."""
    return results.Run(backend, world_size, {name: entry_of(name, status) for name, status in outcomes.items()},
                       {"torch": "2.13", "lockstep": "1", "python": "3", "cores": 2, "seconds": 60})


def runs_of(gloo, lockstep, replace_gloo):
    """The runs in which the one test ends so; None: it was not run."""
    outcomes = dict(zip(suites.BACKENDS, (gloo, lockstep, replace_gloo)))
    return {(backend, 4): run_of(backend, {"distributed_test.C.test_x": outcome} if outcome else {})
            for backend, outcome in outcomes.items()}


@pytest.mark.parametrize("outcomes, broken", [
    (("passed", "passed", "passed"), []),
    (("passed", "skipped", "passed"), []),
    (("failed", "failed", "failed"), []),
    (("skipped", "failed", "passed"), []),
    (("passed", "failed", "passed"), ["lockstep"]),
    (("passed", "timed out", "passed"), ["lockstep"]),
    (("passed", "passed", "failed"), ["replace_gloo"]),
    (("passed", "skipped", "skipped"), ["replace_gloo"]),
    (("passed", None, "passed"), ["lockstep"]),
    (("passed", "failed", None), ["replace_gloo", "lockstep"]),
])
def test_what_passes_with_gloo_must_pass_with_us(outcomes, broken):
    runs = runs_of(*outcomes)
    assert [violation.backend for violation in results.judge(runs, {})] == broken
    assert results.judge(runs, {"distributed_test.C.test_x": "a reason"}) == []


def test_tests_that_name_gloo_need_no_run_with_lockstep():
    runs = {(backend, 4): run_of(backend, {"rpc.rpc_test.C.test_x": "passed"}) for backend in ("gloo", "replace_gloo")}
    assert results.judge(runs, {}) == []


@pytest.mark.parametrize("outcomes, idle", [
    (("passed", "passed", "passed"), True),
    (("passed", "skipped", "passed"), True),
    (("passed", "failed", "passed"), False),
    (("passed", "passed", "timed out"), False),
    (("passed", "passed", None), False),
])
def test_a_left_out_test_that_passes_is_complained_about(outcomes, idle):
    assert bool(results.idle_entries(runs_of(*outcomes), {"distributed_test.C.test_x": "a reason"})) == idle


def saved(tmp_path, *outcomes):
    path = tmp_path / "results.json"
    results.save(list(runs_of(*outcomes).values()), path)
    return path


@pytest.mark.parametrize("outcomes, left_out, status, message", [
    (("passed", "skipped", "passed"), "", 0, "1 tests pass with gloo; 0 break the rule, 0 are left out"),
    (("passed", "failed", "passed"), "", 1, "distributed_test.C.test_x with lockstep, 4 ranks: failed"),
    (("passed", "failed", "passed"), "distributed_test.C.test_x", 0, "0 break the rule, 1 are left out"),
    (("passed", "passed", "passed"), "distributed_test.C.test_x", 1, "it passes: remove the entry"),
])
def test_compare(tmp_path, outcomes, left_out, status, message):
    path = tmp_path / "left_out.toml"
    path.write_text(LEFT_OUT_ENTRY.format(name=left_out, reason="a reason") if left_out else "")
    answer, stdout, stderr = drive("--left-out", path, "compare", saved(tmp_path, *outcomes))
    assert answer == status, stdout + stderr
    assert message in stdout


@pytest.mark.parametrize("text, message", [
    ("{}", "holds no results"),
    ("[1]", "holds no results"),
    ("{", "holds no results"),
    ('{"format": 2, "runs": []}', "has format 2"),
    ('{"format": 1, "runs": []}', "no run of gloo"),
])
def test_compare_refuses_what_is_no_result(tmp_path, text, message):
    path = tmp_path / "results.json"
    path.write_text(text)
    status, _, stderr = drive("compare", path)
    assert status == 2
    assert message in stderr
    assert "Traceback" not in stderr


def test_two_runs_of_one_kind_are_ambiguous(tmp_path):
    path = saved(tmp_path, "passed", "passed", "passed")
    with pytest.raises(results.ResultsError, match="second run of gloo with 4 ranks"):
        results.load([path, path])


@pytest.mark.parametrize("text, message", [
    (LEFT_OUT_ENTRY.format(name="a", reason="") , "has no reason"),
    (LEFT_OUT_ENTRY.format(name="a", reason="why") * 2, "twice"),
    ("".join(LEFT_OUT_ENTRY.format(name=name, reason="why") for name in "abcdef"), "leaves out 6 tests; at most 5"),
    ('[[test]]\nname = "a"\n', "a name and a reason"),
    ('[[test]]\nname = 1\nreason = "why"\n', "a name and a reason"),
    ('[test]\nname = "a"\nreason = "why"\n', r"\[\[test\]\] tables and nothing else"),
    ('[[tests]]\nname = "a"\nreason = "why"\n', r"\[\[test\]\] tables and nothing else"),
    ("name =", "is no TOML"),
])
def test_the_list_of_left_out_tests_has_rules(tmp_path, text, message):
    path = tmp_path / "left_out.toml"
    path.write_text(text)
    with pytest.raises(lists.ListError, match=message):
        lists.read_left_out(path)


def test_five_may_be_left_out(tmp_path):
    path = tmp_path / "left_out.toml"
    path.write_text("".join(LEFT_OUT_ENTRY.format(name=name, reason="two\\n  words") for name in "abcde"))
    assert lists.read_left_out(path) == dict.fromkeys("abcde", "two words")


def test_names_of_modules_that_a_run_lacks_are_not_checked():
    known = ["distributed_test.C.test_x"]
    lists.check_left_out("left_out.toml", ["rpc.rpc_test.C.test_y", *known], known)
    with pytest.raises(lists.ListError, match="do not exist: distributed_test.C.test_y, elsewhere.C.test_z;"):
        lists.check_left_out("left_out.toml", ["distributed_test.C.test_y", "elsewhere.C.test_z"], known)


def test_the_quick_subset_keeps_the_order_and_knows_its_patterns(tmp_path):
    known = ["distributed_test.C.test_b", "distributed_test.C.test_a", "distributed_test.C.test_c"]
    path = tmp_path / "quick.toml"
    path.write_text('tests = ["*_a", "*_b", "rpc.rpc_test.C.test_of_another_run"]')
    assert lists.quick_subset(known, path) == known[:2]
    path.write_text('tests = ["distributed_test.C.test_gone"]')
    with pytest.raises(lists.ListError, match="no test matches distributed_test.C.test_gone"):
        lists.quick_subset(known, path)
    path.write_text("tests = []")
    with pytest.raises(lists.ListError, match="not empty"):
        lists.quick_subset(known, path)


def test_a_reason_names_the_exception_and_the_place():
    text = ('Traceback…\n  File "/x/torch/testing/_internal/distributed/rpc/rpc_test.py", line 7, in test\n'
            "torch.Error: first\n\nRuntimeError: Process 0 exited with error code 10 and exception:\n  more\n")
    assert case.reason_of(text) == "torch.Error: first (rpc/rpc_test.py:7)"
    assert case.reason_of("") == "no text"


def test_the_page_shows_what_is_not_passed_everywhere():
    page = document.page(runs_of("passed", "failed", "passed"), {"a.test_y": "a reason"})
    assert "**1 tests that pass with gloo break the rule: see below.**" in page
    assert "| `distributed_test` | 4 | 1 / 0 / 0, 0 s | 0 / 0 / 1, 0 s | 1 / 0 / 0, 0 s |" in page
    assert "| passed | failed | passed | 4 | 1: `distributed_test.C.test_x` |" in page
    assert "- `a.test_y`: a reason" in page
    assert "The rule holds" in document.page(runs_of("passed", "skipped", "passed"), {})


def test_the_page_names_the_days_and_the_commits_of_its_runs():
    runs = runs_of("passed", "passed", "passed")
    assert "Run on unknown at commit unknown." in document.page(runs, {})  # results of before these were written
    for day, run in enumerate(runs.values(), 1):
        run.about |= {"date": f"2026-11-0{min(day, 2)}", "commit": "abc"}
    assert "Run on 2026-11-01 and 2026-11-02 at commit `abc`." in document.page(runs, {})


def test_the_page_in_the_documents_says_that_the_rule_holds():
    text = document_file().read_text()
    assert "The rule holds" in text
    assert re.search(r"Run on \d{4}-\d\d-\d\d at commit `[0-9a-f]{7,}`\.", text)
    for name in lists.read_left_out():
        assert f"`{name}`" in text, f"{name} is left out since the page was made; make it anew, it says how"


def document_file():
    return PYTHON.parent / "docs" / "internals" / "conformance.md"


def methods_of(path):
    """The names of methods test_… of a Python file's classes."""
    return [item.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
            for item in node.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")]


def test_every_module_of_the_wheel_is_known_as_test_or_helper():
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    root = pathlib.Path(torch) / "testing" / "_internal" / "distributed"
    found = {}
    for path in root.rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if len(path.read_text().splitlines()) > 1:
            found[name] = bool(methods_of(path))
    assert found == dict.fromkeys(suites.TEST_MODULES, True) | dict.fromkeys(suites.HELPER_MODULES, False)


def conform(folder, *arguments, seconds, hosts=1):
    """Runs PyTorch's tests with all backends and compares; the runs. Fails with everything that breaks the rule."""
    path = folder / "results.json"
    status, stdout, stderr = drive("run", *BACKENDS, *arguments, "--jobs", 2, "--output", path, seconds=seconds,
                                   environment={"LOCKSTEP_TEST_HOSTS": str(hosts)})
    assert status in RUN_ENDED, stdout + stderr
    if hosts > 1 and "needs UCX" in stdout:
        pytest.skip("ranks on several hosts need UCX")
    status, compared, errors = drive("compare", path)
    assert status == 0, f"{compared}{errors}\n--- the run\n{stdout}"
    return results.load([path])


def check_really_ran(runs, world_size, least_passed=LEAST_PASSED):
    """Neither an empty run nor the wrong engine."""
    for backend in suites.BACKENDS:
        run = runs[backend, world_size]
        assert run.about["engine"].startswith("lockstep.") == (backend != "gloo")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.about["date"])
    main = [name for name in runs["gloo", world_size].tests if suites.module_of(name) == suites.MAIN]
    assert runs["gloo", world_size].count(main)["passed"] >= least_passed


def test_quick_subset_passes_as_with_gloo(tmp_path):
    runs = conform(tmp_path, "--subset", "quick", seconds=QUICK_SECONDS)
    check_really_ran(runs, 4, LEAST_PASSED_QUICK)
    for operation in OPERATIONS:
        name = f"{suites.MAIN}.TestDistBackendWithSpawn.test_{operation}"
        assert results.status(runs["replace_gloo", 4], name) == "passed", name


@pytest.mark.long
def test_everything_passes_as_with_gloo(tmp_path):
    runs = conform(tmp_path, "--world-size", 4, "--world-size", 8, seconds=LONG_SECONDS)
    check_really_ran(runs, 4)
    check_really_ran(runs, 8)
    modules = {suites.module_of(name) for name in runs["replace_gloo", 4].tests}
    assert modules == set(suites.TEST_MODULES)


@pytest.mark.long
def test_everything_passes_over_two_hosts(tmp_path):
    check_really_ran(conform(tmp_path, "--world-size", 4, seconds=LONG_SECONDS, hosts=2), 4)

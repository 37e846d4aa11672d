"""Tests of scripts/test: its options, how --only picks C++ tests, and how results are counted."""

import fnmatch
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts/lib"))
import describe_gpu  # noqa: E402
import record_tests  # noqa: E402
import select_tests  # noqa: E402
import summarize_tests  # noqa: E402

SOURCE = """
TEST(Deadline, Expires) {
TEST_F(Deadline, NeverComes) {
TEST_P(Arena, Grows) {
INSTANTIATE_TEST_SUITE_P(Sizes, Arena, Values(1, 2));
TYPED_TEST_SUITE(Kernels, Types);
TYPED_TEST(Kernels, Add) {
TEST_P(Bare, Works) {
INSTANTIATE_TEST_SUITE_P(, Bare, Values(1));
"""


def test_case_names():
    assert select_tests.case_names([SOURCE]) == ["Deadline.Expires", "Deadline.NeverComes", "Sizes/Arena.Grows/N",
                                                 "Kernels/N.Add", "Bare.Works/N"]


@pytest.mark.parametrize("text, selected", [
    ("base", [("program", "base_tests"), ("program", "base_gpu")]),
    ("Grows", [("cases", "base_tests"), ("cases", "base_gpu")]),
    ("Arena.Grows/1", [("cases", "base_tests"), ("cases", "base_gpu")]),
    ("Sizes/Arena", [("cases", "base_tests"), ("cases", "base_gpu")]),
    ("Kernels/0.Add", [("cases", "base_tests"), ("cases", "base_gpu")]),
    ("Bare.Works/named", [("cases", "base_tests"), ("cases", "base_gpu")]),
    ("Kernels.Add", []),
    ("idx", [("program", "idx_fuzz")]),
    ("nonesuch", []),
    ("data", [("program", "data_tests"), ("program", "data_hosts")]),
    ("Reads", [("cases", "data_tests")]),
])
def test_select_cpp(text, selected):
    tests = ["base_tests", "data_tests", "idx_fuzz", "base_gpu", "data_hosts"]
    assert select_tests.select_cpp(tests, {"base": [SOURCE], "data": ["TEST(Idx, Reads) {"]}, text) == selected


def hosts_tests():
    """(room, pattern) of all that rooms name after HOSTS_TESTS."""
    for path in (ROOT / "lockstep").rglob("CMakeLists.txt"):
        text = re.sub(r"#.*", "", path.read_text())
        for words in re.findall(r"\bHOSTS_TESTS\s((?:(?![A-Z_]+\s)[^)])*)", text):
            yield from ((path.parent.name, word.removeprefix("-")) for word in words.split())


def test_what_shall_run_over_hosts_is_there():
    """A test that was renamed would be left out in silence."""
    rooms, patterns = select_tests.sources_of_rooms(), list(hosts_tests())
    assert {"collectives", "ddp", "train"} <= {room for room, _ in patterns}
    for room, pattern in patterns:
        known = re.sub(r"/\d+$", "/N", pattern)
        assert fnmatch.filter(select_tests.case_names(rooms[room]), known), f"{room} has no test {pattern}"


FILES = {"lockstep/data/csv_test.py": 'def test_reads_rows(bin_dir):\n    run(bin_dir / "csv_driver")\n',
         "tests/cli_test.py": 'def test_help(programs):\n    programs.run("lockstep", "run")\n',
         "python/tests/ddp_test.py": "class TestBuckets:\n    def test_tail(self):\n        pass\n"}


@pytest.mark.parametrize("text, chosen", [
    ("lockstep/data", [("file", "lockstep/data/csv_test.py")]), ("CSV", [("file", "lockstep/data/csv_test.py")]),
    ("help", [("tests", "tests/cli_test.py")]), ("Buckets", [("tests", "python/tests/ddp_test.py")]),
    ("tail", [("tests", "python/tests/ddp_test.py")]), ("driver", []),
])
def test_select_python(text, chosen):
    assert select_tests.select_python(FILES, text) == chosen


def test_links_to_a_program_are_programs():
    ninja = ("build bin/lockstep: CXX_EXECUTABLE_LINKER__lockstep_cli_Release cli/main.cc.o | lib/liblockstep.so\n"
             "build bin/test_drivers bin/csv_driver bin/idx_driver | ${cmake_ninja_workdir}bin/csv_driver: CXX_EXECUTABLE_LINKER__test_drivers_Release a.o\n"
             "build lib/liblockstep.so: CXX_SHARED_LIBRARY_LINKER__lockstep_Release b.o\n")
    assert select_tests.program_names(ninja) == ["lockstep", "test_drivers", "csv_driver", "idx_driver"]


def test_only_what_the_selected_need_is_built():
    programs = ["lockstep", "csv_driver", "idx_fuzz"]

    def targets_of(*python):
        return select_tests.targets_of([], [("file", path) for path in python], FILES, programs)

    of_data = [("program", f"data_{kind}") for kind in ("tests", "gpu", "hosts")]
    assert select_tests.targets_of(of_data, [], FILES, programs) == ["bin/data_tests"]
    assert targets_of("lockstep/data/csv_test.py") == ["bin/csv_driver", "bin/lockstep"]
    assert targets_of("tests/cli_test.py") == ["bin/lockstep"]
    assert targets_of("python/tests/ddp_test.py") == ["python/all"]


GTEST = """[==========] Running 4 tests from 2 test suites.
rank 1: [==========] 1 test from 1 test suite ran. (3 ms total)
rank 1: [  PASSED  ] 1 test.
[  FAILED  ] Arena.Shrinks (2 ms)
[==========] 4 tests from 2 test suites ran. (25 ms total)
[  PASSED  ] 2 tests.
[  SKIPPED ] 1 test, listed below:
[  SKIPPED ] Arena.Needs16Ranks
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Arena.Shrinks

 1 FAILED TEST
"""


def report(folder, name, *cases):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("<testsuite>" + "".join(cases) + "</testsuite>")


def case(name, output="", inner=""):
    return f'<testcase name="{name}">{inner}<system-out><![CDATA[{output}]]></system-out></testcase>'


@pytest.mark.parametrize("cases, counts, names", [
    ([case("a_tests", GTEST, "<failure/>")], (2, 1, 1), ["a_tests: Arena.Shrinks"]),
    ([case("a_tests", "[==========] Running 4 tests\n", "<failure/>")], (0, 1, 0), ["a_tests"]),  # crashed
    ([case("a_tests", GTEST.replace("FAILED", "ok"), "<failure/>")], (0, 1, 0), ["a_tests"]),  # crashed at exit
    ([case("example")], (1, 0, 0), []),
    ([case("example", inner="<skipped/>")], (0, 0, 1), []),
    ([case("test_x", inner="<error/>"), case("test_y")], (1, 1, 0), ["test_x"]),
])
def test_summary(tmp_path, cases, counts, names):
    report(tmp_path, "ctest.xml", *cases)
    total, failed, *_ = summarize_tests.summarize(tmp_path)
    assert (total["passed"], total["failed"], total["skipped"]) == counts
    assert failed == names


def test_the_slowest_are_named(tmp_path):
    output = "[       OK ] Arena.Grows (9500 ms)\n[       OK ] Arena.Shrinks (30 ms)\n"
    report = ('<testsuite><testcase classname="a_test" name="test_b" time="20.4"/><testcase name="arena_tests" time="31">'
              f"<system-out>{output}</system-out></testcase></testsuite>")
    (tmp_path / "x.xml").write_text(report)
    assert summarize_tests.summarize(tmp_path)[2] == [(20.4, "a_test.test_b"), (9.5, "arena_tests: Arena.Grows")]


def test_those_that_wait_for_a_second_gpu_are_named(tmp_path):
    output = """[ RUN      ] DdpOnCuda.TwoCards
ddp_test.cc:7: Skipped
needs 2 GPUs
[  SKIPPED ] DdpOnCuda.TwoCards (0 ms)
[ RUN      ] DdpOnCuda.Sixteen
ddp_test.cc:9: Skipped
needs 16 cores
[  SKIPPED ] DdpOnCuda.Sixteen (0 ms)
[==========] 2 tests from 1 test suite ran. (1 ms total)
[  SKIPPED ] 2 tests, listed below:
[  SKIPPED ] DdpOnCuda.TwoCards
[  SKIPPED ] DdpOnCuda.Sixteen
"""
    skipped = '<skipped message="needs 2 GPUs"/>'
    report(tmp_path, "x.xml", case("ddp_gpu", output), case("test_x", inner=skipped), case("test_y", inner="<skipped/>"))
    assert summarize_tests.summarize(tmp_path)[3] == ["ddp_gpu: DdpOnCuda.TwoCards", "test_x"]


class FakeTorch:
    """What describe_gpu asks of torch."""

    __version__ = "2.13.0+cu130"

    class version:
        cuda = "13.0"

    class cuda:
        class nccl:
            version = staticmethod(lambda: (2, 29, 7))

    class distributed:
        is_nccl_available = staticmethod(lambda: True)


def test_what_the_gpu_tests_ran_on():
    cards = describe_gpu.cards_of("0, NVIDIA RTX A6000, 49140 MiB, 570.86.10\n1, NVIDIA T4, 15360 MiB, 570.86.10\n")
    lines = describe_gpu.describe(cards, FakeTorch)
    assert lines[:2] == ["ran on: card 0: NVIDIA RTX A6000, 49140 MiB", "ran on: card 1: NVIDIA T4, 15360 MiB"]
    assert lines[2].startswith("ran on: driver 570.86.10, torch 2.13.0+cu130, CUDA 13.0, NCCL 2.29.7, Linux ")
    assert describe_gpu.describe([], FakeTorch) == ["ran on: no card that nvidia-smi or torch can see"]


def test_summary_over_several_reports(tmp_path):
    report(tmp_path, "ctest.xml", case("a"))
    report(tmp_path, "pytest.xml", case("b"), case("c"))
    assert summarize_tests.summarize(tmp_path)[0]["passed"] == 3


def test_what_has_passed_is_recorded_in_its_row(tmp_path):
    rows = ["# Title", "| command | what | when | takes | last passed |", "|---|---|---|---|---|",
            "| `scripts/test` | all | always | 44 min | once |", "| `scripts/test --all` | more | rarely | | never |", "End."]
    document = tmp_path / "testing.md"
    document.write_text("\n".join(rows) + "\n")
    report(tmp_path / "reports", "x.xml", case("a"), case("b", inner="<skipped/>"))

    def run(*arguments):
        return subprocess.run([sys.executable, ROOT / "scripts/lib/record_tests.py", *arguments]).returncode

    assert run(document, "scripts/test --only data", tmp_path / "reports", "3610", "abc1234") == 1
    (tmp_path / "none").mkdir()
    assert run(document, "scripts/test --all", tmp_path / "none", "3610", "abc1234") == 1, "nothing has passed"
    assert document.read_text().splitlines() == rows
    assert run(document, "scripts/test --all", tmp_path / "reports", "3610", "abc1234") == 0
    lines = document.read_text().splitlines()
    assert lines[:4] + lines[5:] == rows[:4] + rows[5:]
    assert re.fullmatch(r"\| `scripts/test --all` \| more \| rarely \| 60 min \| "
                        r"\d{4}-\d\d-\d\d, `abc1234`: 1 tests passed, 1 skipped \|", lines[4])


def test_the_document_has_a_row_for_each_whole_run():
    text = (ROOT / "docs/internals/testing.md").read_text().splitlines()
    for options in ("", " --all", " --sanitizer address", " --sanitizer thread", " --gpu"):
        assert record_tests.find_row(text, "scripts/test" + options) is not None


@pytest.mark.parametrize("arguments, message", [
    (["--only"], "--only needs a value"),
    (["--only", "a b"], "--only is 'a b'"),
    (["--sanitizer", "memory"], "takes address or thread"),
    (["--sanitizer", "thread", "--preset", "debug"], "exclude each other"),
    (["--preset", "fast"], "takes release or debug"),
    (["fast"], "unknown option 'fast'"),
    (["--record", "--preset", "debug"], "--record takes the preset release"),
    (["--record", "--only", "data"], "no row for 'scripts/test --only data'"),
])
def test_misused_options(arguments, message):
    result = subprocess.run([ROOT / "scripts/test", *arguments], text=True, capture_output=True)
    assert result.returncode == 1 and message in result.stderr and len(result.stderr.splitlines()) == 1

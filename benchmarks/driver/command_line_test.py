"""Tests of the command line of scripts/bench: what it refuses before the minutes of set-up, and how it names suites."""

import re
import subprocess

import pytest

from benchmarks.driver import contenders
from benchmarks.driver.__main__ import SUITES, parse

SCRIPT = contenders.ROOT / "scripts" / "bench"


def bench(*arguments):
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


def options_of(*arguments):
    """What the script passes on to the driver for these arguments: its parsing alone, without the set-up."""
    text = SCRIPT.read_text()
    assert text.rstrip().endswith('main "$@"')
    program = text.rstrip().removesuffix('main "$@"').replace('"${BASH_SOURCE[0]}"', f'"{SCRIPT}"')
    program += 'parse_options "$@"\nprintf "%s\\n" ${options[@]+"${options[@]}"}\n'
    done = subprocess.run(["bash", "-c", program, "bench", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_script_and_driver_know_the_same_suites():
    assert re.search(r"^suites='(.*)'$", SCRIPT.read_text(), re.M)[1].split("|") == list(SUITES)
    usage = bench("--help").stdout
    assert all(suite in usage for suite in SUITES)


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_by_itself_is_the_same_as_only(suite):
    assert options_of(suite) == options_of("--only", suite) == ["--only", suite]
    assert parse(options_of(suite)).only == [suite]


def test_suites_between_options():
    options = options_of("--quick", "python", "--rounds", "7", "step", "--only", "latency")
    assert options == ["--quick", "--only", "python", "--rounds", "7", "--only", "step", "--only", "latency"]
    assert parse(options).only == ["python", "step", "latency"]


@pytest.mark.parametrize("arguments, words", [
    (["pythn"], "there is no suite 'pythn'"), (["--only", "all"], "there is no suite 'all'"),
    ([""], "there is no suite ''"),
    (["python", "--only"], "--only needs a value"), (["--fast"], "unknown option '--fast'"),
    (["--rounds", "0"], "--rounds is '0'"), (["python", "all_reduce|step"], "there is no suite 'all_reduce|step'")])
def test_misuse_is_refused_in_one_line(arguments, words):
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr and done.stderr.count("\n") == 1 and "scripts/bench --help" in done.stderr

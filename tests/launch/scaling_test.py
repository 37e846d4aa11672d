"""`lockstep scaling`: what it measures, what it refuses, and how it ends when something goes wrong."""

import json
import signal
import xml.etree.ElementTree

import pytest

MISUSE = 2
# A program of which N ranks get N - 0.1 (N - 1) times as much done as one.
SAYS = ["sh", "-c", "echo from rank $RANK; [ $RANK != 0 ] || echo LOCKSTEP_SCALING $((90 * WORLD_SIZE + 10)) images/s"]


def test_a_program_that_says_its_throughput(programs):
    done = programs.run("lockstep", "scaling", "--ranks", "1,3", "--no-barrier", "--json", "out.json", "--plot", "out.svg",
                        "--", *SAYS)  # fmt: skip
    assert done.status == 0, done.text
    report = json.loads((programs.folder / "out.json").read_text())
    assert report["command"] == SAYS and (report["throughput_from"], report["unit"]) == ("program", "images/s")
    one, three = report["results"]
    assert (one["ranks"], one["throughput"], one["speedup"], one["efficiency"], one["barrier_us"]) == (1, 100, 1, 1, None)
    assert (three["ranks"], three["throughput"]) == (3, 280) and three["speedup"] == pytest.approx(2.8)
    assert three["efficiency"] == pytest.approx(2.8 / 3) and three["seconds"] > 0
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == ["1", "3"] and [row[2] for row in rows] == ["100", "280"], done.text
    assert "[rank 2] from rank 2" in done.stderr and "from rank 2" not in done.stdout, done.text
    root = xml.etree.ElementTree.parse(programs.folder / "out.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_barrier_is_measured_between_as_many_ranks(programs):
    done = programs.run("lockstep", "scaling", "--ranks", "1,2", "--json", "-", "--", "all_reduce")
    assert done.status == 0, done.text
    report = json.loads(done.stdout)
    assert report["throughput_from"] == "time" and report["unit"] == "runs/h"
    one, two = report["results"]
    assert one["barrier_us"] is None and two["barrier_us"] > 0
    for each in (one, two):
        assert each["throughput"] == pytest.approx(3600 / each["seconds"])
    assert "#  ranks" in done.stderr, done.text


def test_each_run_counts_and_each_rank_has_one_thread(programs):
    command = ["sh", "-c", "echo $OMP_NUM_THREADS >> threads; echo LOCKSTEP_SCALING $(wc -l < threads)"]
    done = programs.run("lockstep", "scaling", "--ranks", "1", "--repeats", "3", "--no-barrier", "--json", "-", "--", *command)
    assert done.status == 0, done.text
    assert (programs.folder / "threads").read_text() == "1\n" * 3
    (result,) = json.loads(done.stdout)["results"]
    assert result["throughput"] == 2  # the median of 1, 2 and 3


def test_work_for_each_rank_is_counted_as_often(programs):
    done = programs.run("lockstep", "scaling", "--ranks", "2,3", "--work", "per-rank", "--no-barrier", "--json", "-", "true")
    assert done.status == 0, done.text
    report = json.loads(done.stdout)
    assert report["work"] == "per-rank"
    for each in report["results"]:
        assert each["throughput"] == pytest.approx(each["ranks"] * 3600 / each["seconds"])


def test_the_trainers_bar_tells_its_throughput(programs):
    command = ["sh", "-c", "printf '\\repoch 1: 9/9 [00:01<00:00, 9 it/s, samples/s=500, lr=0.1]\\n' >&2"]
    done = programs.run("lockstep", "scaling", "--ranks", "1", "--no-barrier", "--json", "-", "--", *command)
    assert done.status == 0, done.text
    report = json.loads(done.stdout)
    assert (report["throughput_from"], report["results"][0]["throughput"]) == ("trainer", 500)


def test_a_program_that_fails_ends_it_with_what_is_known(programs):
    command = ["sh", "-c", "[ $WORLD_SIZE = 1 ] || exit 7"]
    done = programs.run("lockstep", "scaling", "--ranks", "1,2,3", "--no-barrier", "--json", "out.json", "--", *command)
    assert done.status == 1 and "error: the program failed with 2 ranks" in done.stderr, done.text
    assert [each["ranks"] for each in json.loads((programs.folder / "out.json").read_text())["results"]] == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_all_its_ranks(programs, number):
    command = ["sh", "-c", "[ $WORLD_SIZE = 1 ] || { echo rank $RANK waits; sleep 1000; }"]
    child = programs.start("lockstep", "scaling", "--ranks", "1,2,4", "--no-barrier", "--", *command)
    child.wait_for("rank 0 waits", "stderr")
    child.wait_for("rank 1 waits", "stderr")
    child.kill(number)
    done = child.finish()
    assert done.status == 128 + number, done.text
    assert [line.split()[0] for line in done.stdout.splitlines() if not line.startswith("#")] == ["1"], done.text
    programs.wait_until_gone()


@pytest.mark.parametrize("words, message", [
    ([], "PROGRAM is required"), (["--ranks", "1,x", "true"], "--ranks is '1,x'"), (["--nonesuch", "true"], "--nonesuch"),
    (["--ranks", "1", "-n", "2", "true"], "excludes"), (["--repeats", "0", "true"], "--repeats is 0"),
    (["--work", "more", "true"], "more"), (["--ranks", "1", "--plot", "/nonesuch/x.svg", "true"], "--plot '/nonesuch/x.svg'"),
    (["--ranks", "1", "--no-barrier", "/nonesuch/program"], "/nonesuch/program")])  # fmt: skip
def test_misuse_is_refused(programs, words, message):
    done = programs.run("lockstep", "scaling", *words)
    assert done.status == MISUSE and message in done.stderr and "Try: lockstep scaling --help" in done.stderr, done.text


def test_help_shows_its_options_and_examples(programs):
    done = programs.run("lockstep", "scaling", "--help")
    assert done.status == 0 and done.stderr == "", done.text
    for word in ["Usage: lockstep scaling [OPTIONS] PROGRAM [ARGS...]", "--ranks", "--plot", "--work", "Examples:"]:
        assert word in done.stdout, done.text
